// Conversion between the definition of an experiment and the texts of its form. Errors have the name of their field in
// `field`. Pure.

/** Maximum number of cells of an experiment. Each cell is one run. */
const MAX_CELLS = 10000;
const MAX_SEED = 0xFFFFFFFF;

/** Returns an error of a field. */
const fieldError = (field, message) => Object.assign(new Error(message), { field });

/** Returns the seeds in a text such as `1, 2, 10-15`. */
export function seedsOf(text) {
  const seeds = new Set();
  for (const part of text.split(/[\s,]+/).filter(Boolean)) {
    const [, from, to = from] = /^(\d+)(?:-(\d+))?$/.exec(part) ?? [];
    const [first, last] = [Number(from), Number(to)];
    if (from === undefined || last > MAX_SEED || first > last) throw fieldError('seeds', `Seeds must be integers from 0 to ${MAX_SEED} or ranges such as 1-4, got “${part}”.`);
    if (seeds.size + last - first >= MAX_CELLS) throw fieldError('seeds', `An experiment has at most ${MAX_CELLS} cells; the range ${part} has too many seeds.`);
    for (let seed = first; seed <= last; seed += 1) {
      if (seeds.has(seed)) throw fieldError('seeds', `The seed ${seed} occurs twice; its runs would be equal. Remove one.`);
      seeds.add(seed);
    }
  }
  if (!seeds.size) throw fieldError('seeds', 'Enter at least one seed, e.g. 1.');
  return [...seeds];
}

/** Returns seeds as text, with three or more consecutive ones as a range. */
export function seedsText(seeds) {
  const parts = [];
  for (let start = 0; start < seeds.length;) {
    let end = start;
    while (seeds[end + 1] === seeds[end] + 1) end += 1;
    if (end - start >= 2) parts.push(`${seeds[start]}-${seeds[end]}`);
    else parts.push(...seeds.slice(start, end + 1));
    start = end + 1;
  }
  return parts.join(', ');
}

/** Returns the end of the JSON object at the start of a text, or -1 if it is not closed. */
function objectEnd(text) {
  let depth = 0;
  let isQuoted = false;
  for (let i = 0; i < text.length; i += 1) {
    const c = text[i];
    if (isQuoted && c === '\\') i += 1;
    else if (c === '"') isQuoted = !isQuoted;
    else if (!isQuoted && '{['.includes(c)) depth += 1;
    else if (!isQuoted && '}]'.includes(c)) {
      depth -= 1;
      if (depth === 0) return i + 1;
    }
  }
  return -1;
}

/** Returns the list of mods on a line: names with optional configurations, or a JSON array. */
function modsOfLine(line, number) {
  const lineError = (message) => fieldError('mods', `Line ${number} of the mods: ${message}`);
  if (line === 'none') return [];
  if (line.startsWith('[')) {
    try {
      return JSON.parse(line);
    } catch (error) {
      throw lineError(`it must be JSON: ${error.message}.`);
    }
  }
  const mods = [];
  let rest = line;
  while (rest) {
    const [, name] = /^([^\s,{[]+)\s*/.exec(rest) ?? [];
    if (!name) throw lineError(`expected the name of a mod at “${rest}”.`);
    rest = rest.slice(name.length).trimStart();
    if (rest.startsWith('{')) {
      const end = objectEnd(rest);
      if (end < 0) throw lineError(`the configuration of ${name} is not closed.`);
      try {
        mods.push({ name, config: JSON.parse(rest.slice(0, end)) });
      } catch (error) {
        throw lineError(`the configuration of ${name} must be JSON: ${error.message}.`);
      }
      rest = rest.slice(end).trimStart();
    } else mods.push({ name });
    if (!rest) break;
    if (!rest.startsWith(',')) throw lineError(`expected a comma before “${rest}”.`);
    rest = rest.slice(1).trimStart();
  }
  return mods;
}

/** Returns the lines of a text that are not empty, as `[line, number]`. */
const numberedLines = (text) => text.split('\n').map((line, i) => [line.trim(), i + 1]).filter(([line]) => line);

/** Returns the lists of mods in a text, one per line. */
export function modsOf(text) {
  const lists = numberedLines(text).map(([line, number]) => modsOfLine(line, number));
  return lists.length ? lists : [[]];
}

/** Returns lists of mods as text. */
function modsText(lists) {
  const label = (mod) => (typeof mod === 'string' ? mod : `${mod.name}${mod.config ? ` ${JSON.stringify(mod.config)}` : ''}`);
  const isSimple = (mod) => typeof mod === 'string' || Object.keys(mod).every((name) => ['name', 'config'].includes(name));
  return lists.map((mods) => (mods.length === 0 ? 'none' : mods.every(isSimple) ? mods.map(label).join(', ') : JSON.stringify(mods))).join('\n');
}

/** Returns the parameters on a line: `name=value` pairs, or a JSON object. */
function parametersOfLine(line, number) {
  const lineError = (message) => fieldError('parameters', `Line ${number} of the parameters: ${message}`);
  if (line === 'default') return {};
  if (line.startsWith('{')) {
    try {
      return JSON.parse(line);
    } catch (error) {
      throw lineError(`it must be JSON: ${error.message}.`);
    }
  }
  const parameters = {};
  for (const pair of line.split(/\s+/)) {
    const [, name, value] = /^(\w+)=(.+)$/.exec(pair) ?? [];
    if (!name) throw lineError(`expected name=value, got “${pair}”.`);
    try {
      parameters[name] = JSON.parse(value);
    } catch {
      parameters[name] = value;
    }
  }
  return parameters;
}

/** Returns the sets of parameters in a text, one per line. */
export function parametersOf(text) {
  const sets = numberedLines(text).map(([line, number]) => parametersOfLine(line, number));
  return sets.length ? sets : [{}];
}

/** Returns sets of parameters as text. */
function parametersText(sets) {
  const isSimple = (value) => ['number', 'boolean'].includes(typeof value) || (typeof value === 'string' && /^[A-Za-z_]\w*$/.test(value) && !['true', 'false', 'null'].includes(value));
  return sets.map((set) => {
    const pairs = Object.entries(set);
    if (!pairs.length) return 'default';
    return pairs.every(([name, value]) => /^\w+$/.test(name) && isSimple(value)) ? pairs.map(([name, value]) => `${name}=${value}`).join(' ') : JSON.stringify(set);
  }).join('\n');
}

/** Returns the rows of comma-separated values (RFC 4180). */
export function csvRows(text) {
  const rows = [];
  let row = [];
  let value = '';
  let isQuoted = false;
  const endRow = () => {
    row.push(value);
    if (row.length > 1 || row[0] !== '') rows.push(row);
    row = [];
    value = '';
  };
  for (let i = 0; i < text.length; i += 1) {
    const c = text[i];
    if (isQuoted) {
      if (c !== '"') value += c;
      else if (text[i + 1] === '"') {
        value += '"';
        i += 1;
      } else isQuoted = false;
    } else if (c === '"' && value === '') isQuoted = true;
    else if (c === ',') {
      row.push(value);
      value = '';
    } else if (c === '\n') endRow();
    else if (c !== '\r') value += c;
  }
  if (isQuoted) throw fieldError('prompts', 'The CSV has an unclosed quotation mark.');
  endRow();
  return rows;
}

/**
 * Returns the prompts in a text. If `format` is `lines`, each line is one; if it is `csv`, they are in the column `prompt`, or
 * in the first column if there is none with that name.
 */
export function promptsOf(text, format) {
  let prompts;
  if (format === 'csv') {
    const rows = csvRows(text);
    const column = rows[0]?.findIndex((name) => name.trim().toLowerCase() === 'prompt') ?? -1;
    prompts = (column < 0 ? rows : rows.slice(1)).map((row) => row[Math.max(0, column)] ?? '').filter(Boolean);
  } else {
    prompts = text.split('\n').map((line) => line.replace(/\r$/, '')).filter((line) => line.trim());
  }
  if (!prompts.length) throw fieldError('prompts', 'Enter at least one prompt.');
  return prompts;
}

/** Returns prompts as `{text, format}`. */
function promptsText(prompts) {
  const isLine = (prompt) => !/[\n\r]/.test(prompt) && prompt.trim();
  if (prompts.every(isLine)) return { text: prompts.join('\n'), format: 'lines' };
  return { text: ['prompt', ...prompts.map((prompt) => `"${prompt.replaceAll('"', '""')}"`)].join('\n'), format: 'csv' };
}

/** Returns the definition of a form `{name, model, prompts, format, seeds, mods, parameters, scorer, regex, python}`. */
export function definitionOf(form) {
  const definition = {
    name: form.name.trim(),
    ...(form.model && { model: form.model }),
    prompts: promptsOf(form.prompts, form.format),
    seeds: seedsOf(form.seeds),
    mods: modsOf(form.mods),
    parameters: parametersOf(form.parameters),
    ...(form.scorer === 'json' && { score: { json: true } }),
    ...(form.scorer === 'regex' && { score: { regex: form.regex } }),
    ...(form.scorer === 'python' && { score: { python: form.python } }),
  };
  if (!definition.name) throw fieldError('name', 'Give the experiment a name of 1 to 64 characters.');
  if (form.scorer === 'regex' && !form.regex) throw fieldError('score', 'Enter the regular expression, or choose another score.');
  if (form.scorer === 'python' && !form.python.trim()) throw fieldError('score', 'Enter the Python function, or choose another score.');
  const cells = cellsOf(definition);
  if (cells > MAX_CELLS) throw fieldError('seeds', `An experiment has at most ${MAX_CELLS} cells, got ${cells}; give fewer seeds, prompts, mods or parameters.`);
  return definition;
}

/** Returns the number of cells of a definition. */
export const cellsOf = ({ prompts, seeds, mods, parameters }) => prompts.length * seeds.length * mods.length * parameters.length;

/** Returns the form of a definition. */
export function formOf(definition) {
  const { text, format } = promptsText(definition.prompts);
  return {
    name: definition.name,
    model: definition.model ?? '',
    prompts: text,
    format,
    seeds: seedsText(definition.seeds),
    mods: modsText(definition.mods ?? [[]]),
    parameters: parametersText(definition.parameters ?? [{}]),
    scorer: Object.keys(definition.score ?? {})[0] ?? 'none',
    regex: definition.score?.regex ?? '',
    python: definition.score?.python ?? '',
  };
}

/** Returns the field of the form that an error of the server names by its `pointer`, or null. */
export function fieldOf(pointer) {
  const [, name] = /^(\w+)/.exec(pointer ?? '') ?? [];
  return ['name', 'model', 'prompts', 'seeds', 'mods', 'parameters', 'score'].includes(name) ? name : null;
}
