// Playwright types into a page in a loop until standard input ends, on one
// connection. It prints a line for each key, and as the last one how many keys
// the page saw and the longest time that one took. Anything that breaks, or that
// the page saw otherwise than typed, is a failure.
import assert from 'node:assert/strict';
import { chromium } from 'playwright-core';

const html = `<!doctype html><title>typing</title><input id=in autofocus><script>
  window.token = Math.random().toString(36);
  window.keys = '';
  addEventListener('keydown', (e) => { if (e.key.length === 1) window.keys += e.key; });
</script>`;

const browser = await chromium.connectOverCDP(process.env.BERTH_CONNECT, { timeout: 180_000 });
let closed = false;
browser.on('disconnected', () => { closed = true; });
const page = browser.contexts()[0].pages()[0];
page.setDefaultTimeout(120_000);
await page.goto('data:text/html,' + encodeURIComponent(html));
const token = await page.evaluate(() => window.token);
await page.focus('#in');

let stop = false;
process.stdin.on('end', () => { stop = true; });
process.stdin.resume();
const alphabet = 'abcdefghijklmnopqrstuvwxyz0123456789';
let typed = '';
let longest = 0;
while (!stop) {
  const key = alphabet[typed.length % alphabet.length];
  const began = performance.now();
  await page.keyboard.type(key);
  longest = Math.max(longest, performance.now() - began);
  typed += key;
  process.stdout.write('key\n');
}
const seen = await page.evaluate(() => ({ keys: window.keys, value: document.querySelector('#in').value, token: window.token }));
assert.equal(seen.keys, typed, 'key events: all, once, in order');
assert.equal(seen.value, typed, 'the value of the field');
assert.equal(seen.token, token, 'the document is the one that was opened');
assert.ok(!closed, 'the connection never dropped');
process.stdout.write(JSON.stringify({ keys: typed.length, longestMs: Math.round(longest) }) + '\n');
await browser.close();
