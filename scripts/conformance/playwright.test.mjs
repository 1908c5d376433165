// Playwright, as its users connect it to a remote browser.
import assert from 'node:assert/strict';
import { writeFile, mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { test } from 'node:test';
import { chromium } from 'playwright-core';
import { create, file, get, json, site, within } from './berth.mjs';

async function connect(t, session) {
  const browser = await chromium.connectOverCDP(session.connectUrl);
  t.after(() => browser.close());
  return browser;
}

test('a default context with one page is there', async (t) => {
  const session = await create(t, { shell: true, viewport: { width: 900, height: 700 } });
  const browser = await connect(t, session);
  assert.equal(browser.contexts().length, 1);
  const [context] = browser.contexts();
  assert.equal(context.pages().length, 1);
  const size = await context.pages()[0].evaluate(() => [innerWidth, innerHeight]);
  assert.deepEqual(size, [900, 700]);
});

test('goto, fill, click, screenshot', async (t) => {
  const session = await create(t, { shell: true });
  const url = await site(session.id);
  const browser = await connect(t, session);
  const page = browser.contexts()[0].pages()[0];
  const answer = await page.goto(url);
  assert.equal(answer.status(), 200);
  assert.equal(await page.title(), 'site');
  await page.fill('#name', 'Ann');
  await page.click('#go');
  assert.equal(await page.textContent('#out'), 'hi Ann');
  const shot = await page.screenshot();
  assert.equal(shot.subarray(1, 4).toString(), 'PNG');
  assert.deepEqual([shot.readUInt32BE(16), shot.readUInt32BE(20)], [1280, 720]);
  const other = await browser.newContext();
  const second = await other.newPage();
  await second.goto(url);
  await second.context().addCookies([{ name: 'c', value: 'v', url }]);
  assert.equal(await second.evaluate(() => document.cookie), 'c=v');
  assert.equal(await page.evaluate(() => document.cookie), '');
  await page.route('**/report.csv', (route) => route.fulfill({ body: 'routed' }));
  assert.equal(await page.evaluate(() => fetch('report.csv').then((r) => r.text())), 'routed');
  await other.close();
});

test('a download lands in the workspace under its suggested name', async (t) => {
  const session = await create(t, { shell: true });
  const url = await site(session.id);
  const browser = await connect(t, session);
  const page = browser.contexts()[0].pages()[0];
  await page.goto(url);
  const [download] = await Promise.all([page.waitForEvent('download'), page.click('#get')]);
  assert.equal(download.suggestedFilename(), 'the report.csv');
  const found = await json('GET', `/v1/sessions/${session.id}/files/wait?pattern=downloads/*.csv&timeoutMs=10000`);
  assert.equal(found.path, '/workspace/downloads/the report.csv');
  assert.equal(String(await file(session.id, found.path)), 'a,b\n1,2\n');
  assert.equal(await download.failure(), null);
});

test('files of the client go up through setInputFiles', async (t) => {
  const session = await create(t, { shell: true });
  const url = await site(session.id);
  const browser = await connect(t, session);
  const page = browser.contexts()[0].pages()[0];
  await page.goto(url);
  await page.setInputFiles('#up', [
    { name: 'one.txt', mimeType: 'text/plain', buffer: Buffer.from('1') },
    { name: 'two.txt', mimeType: 'text/plain', buffer: Buffer.from('2') },
  ]);
  await page.waitForFunction(() => document.querySelector('#out').textContent === 'one.txt=1,two.txt=2');
  const dir = await mkdtemp(join(tmpdir(), 'berth-up-'));
  t.after(() => rm(dir, { recursive: true }));
  await writeFile(join(dir, 'local.txt'), 'from the client');
  await page.setInputFiles('#up', join(dir, 'local.txt'));
  await page.waitForFunction(() => document.querySelector('#out').textContent === 'local.txt=from the client');
});

test('two clients at once; close means that one leaves', async (t) => {
  const session = await create(t, {});
  const first = await connect(t, session);
  const second = await connect(t, session);
  const page = first.contexts()[0].pages()[0];
  await page.goto('data:text/html,<title>shared</title>');
  const seen = second.contexts()[0].pages()[0];
  await within(5000, 'the other client sees the page', async () => (await seen.title()) === 'shared');
  await first.close();
  assert.equal(await seen.evaluate('6*7'), 42);
  assert.equal((await get(session.id)).status, 'RUNNING');
});

test('a client that asks over HTTP first', async (t) => {
  const session = await create(t, {});
  const resolved = session.connectUrl.replace('ws://', 'http://').replace('/v1/connect', '/json/version');
  const { webSocketDebuggerUrl } = await (await fetch(resolved)).json();
  const browser = await chromium.connectOverCDP(webSocketDebuggerUrl);
  assert.match(browser.version(), /^\d+\./);
  await browser.close();
});
