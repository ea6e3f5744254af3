// Imports all tests into one process, so that they share a browser.
import test from 'node:test';
import { readdirSync } from 'node:fs';

const names = readdirSync(new URL('.', import.meta.url)).filter((name) => name.endsWith('.test.mjs'));
// A file that cannot be loaded is a failed test, and the others are still run.
for (const name of names.sort()) await import(`./${name}`).catch((error) => test(`${name} is loaded`, () => { throw error; }));
