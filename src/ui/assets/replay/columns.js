// Reads the columns of a stored run, which `src/trace/columns.rs` writes, without copying them. Pure.
import { COLUMNS, EVENT_COLUMNS, RunColumns } from './run-columns.js';

const MAGIC = 0x434e5552; // "RUNC", little-endian
const VERSION = 2;
/** Version with the times of the tokens as u16 in milliseconds. */
const VERSION_WITH_MS = 1;
const HEADER_BYTES = 20;
const ENTRY_BYTES = 12;

/** Ids of the first sections with columns of rows and of events; those of the other columns follow, in the order of `COLUMNS` and `EVENT_COLUMNS`. */
const ROWS_SECTION = 1;
const STRINGS_SECTION = 11;
const MARKS_SECTION = 12;
const EVENTS_SECTION = 13;

/** Parses a run's columns. Throws an Error that describes invalid bytes. */
export function parseColumns(buffer) {
  const view = new DataView(buffer);
  const isColumns = buffer.byteLength >= HEADER_BYTES && view.getUint32(0, true) === MAGIC;
  const version = isColumns ? view.getUint16(4, true) : 0;
  if (version !== VERSION && version !== VERSION_WITH_MS) throw new Error(`the data is not a column file of version ${VERSION_WITH_MS} or ${VERSION}`);
  const count = view.getUint32(8, true);
  const eventCount = view.getUint32(12, true);
  const sections = new Map();
  for (let i = 0; i < view.getUint32(16, true); i += 1) {
    const entry = HEADER_BYTES + i * ENTRY_BYTES;
    if (entry + ENTRY_BYTES > buffer.byteLength) throw new Error('the table of sections is incomplete');
    sections.set(view.getUint32(entry, true), [view.getUint32(entry + 4, true), view.getUint32(entry + 8, true)]);
  }
  const section = (id) => {
    const [offset, length] = sections.get(id) ?? [];
    if (offset === undefined || offset + length > buffer.byteLength) throw new Error(`section ${id} is missing`);
    return [offset, length];
  };
  const columns = (types, entries, first) => Object.fromEntries(Object.entries(types).map(([name, Type], i) => {
    const [offset, length] = section(first + i);
    if (length !== entries * Type.BYTES_PER_ELEMENT) throw new Error(`section ${first + i} has ${length} bytes`);
    return [name, new Type(buffer, offset, entries)];
  }));
  const rows = columns(version === VERSION ? COLUMNS : { ...COLUMNS, dt: Uint16Array }, count, ROWS_SECTION);
  if (version === VERSION_WITH_MS) rows.dt = Uint32Array.from(rows.dt, (ms) => ms * 1000);
  return RunColumns.of({
    count,
    eventCount,
    rows,
    events: columns(EVENT_COLUMNS, eventCount, EVENTS_SECTION),
    strings: strings(view, buffer, ...section(STRINGS_SECTION)),
    marks: JSON.parse(decoder.decode(new Uint8Array(buffer, ...section(MARKS_SECTION)))),
  });
}

const ASCII = /^[\0-\x7f]*$/;
const decoder = new TextDecoder('utf-8', { ignoreBOM: true });

/** Parses texts: u32 count, u32 offsets[count + 1], UTF-8 bytes. */
function strings(view, buffer, offset, length) {
  const count = length >= 4 ? view.getUint32(offset, true) : 0;
  const textsOffset = offset + 4 + (count + 1) * 4;
  if (textsOffset > offset + length) throw new Error('the table of texts is damaged');
  const offsets = new Uint32Array(buffer, offset + 4, count + 1);
  // If all texts are ASCII, each byte is one character, so one call decodes all texts.
  const bytes = new Uint8Array(buffer, textsOffset, offset + length - textsOffset);
  const all = decoder.decode(bytes);
  const isSorted = offsets.every((start, i) => start <= bytes.length && (i === 0 || offsets[i - 1] <= start));
  if (isSorted && all.length === bytes.length && ASCII.test(all)) return Array.from({ length: count }, (_, i) => all.slice(offsets[i], offsets[i + 1]));
  return Array.from({ length: count }, (_, i) => {
    if (textsOffset + offsets[i + 1] > offset + length) throw new Error('the table of texts is damaged');
    return decoder.decode(new Uint8Array(buffer, textsOffset + offsets[i], offsets[i + 1] - offsets[i]));
  });
}
