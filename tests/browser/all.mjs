// Imports the tests into one process, so that they share a browser: those of the files in TEST_FILES, or else all.
import test from 'node:test';
import { readdirSync } from 'node:fs';

const allNames = readdirSync(new URL('.', import.meta.url)).filter((name) => name.endsWith('.test.mjs')).sort();
// A file that cannot be loaded is a failed test, and the others are still run.
for (const name of process.env.TEST_FILES?.split(',') ?? allNames) {
  await import(`./${name}`).catch((error) => test(`${name} is loaded`, () => { throw error; }));
}
