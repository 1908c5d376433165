// Puppeteer, as its users connect it to a remote browser.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import puppeteer from 'puppeteer-core';
import { create, file, get, json, site, within } from './berth.mjs';

const connect = (session) =>
  puppeteer.connect({ browserWSEndpoint: session.connectUrl, defaultViewport: null });

test('pages, typing, clicking, a screenshot', async (t) => {
  const session = await create(t, { shell: true });
  const url = await site(session.id);
  const browser = await connect(session);
  t.after(() => browser.disconnect());
  const pages = await browser.pages();
  assert.equal(pages.length, 1);
  const [page] = pages;
  await page.goto(url);
  await page.type('#name', 'Bob');
  await page.click('#go');
  assert.equal(await page.$eval('#out', (e) => e.textContent), 'hi Bob');
  const shot = Buffer.from(await page.screenshot());
  assert.equal(shot.subarray(1, 4).toString(), 'PNG');
  const context = await browser.createBrowserContext();
  const other = await context.newPage();
  await other.goto(url);
  assert.equal(await other.title(), 'site');
  await context.close();
});

test('a download, asked for the way Puppeteer users do', async (t) => {
  const session = await create(t, { shell: true });
  const url = await site(session.id);
  const browser = await connect(session);
  t.after(() => browser.disconnect());
  const [page] = await browser.pages();
  const cdp = await page.createCDPSession();
  await cdp.send('Browser.setDownloadBehavior', { behavior: 'allow', downloadPath: '/home/me/Downloads', eventsEnabled: true });
  await page.goto(url);
  await page.click('#get');
  const found = await json('GET', `/v1/sessions/${session.id}/files/wait?pattern=downloads/*&timeoutMs=10000`);
  assert.equal(found.path, '/workspace/downloads/the report.csv');
  assert.equal(String(await file(session.id, found.path)), 'a,b\n1,2\n');
});

test('disconnect and come back within the grace: the page is as it was', async (t) => {
  const session = await create(t, {});
  let browser = await connect(session);
  let [page] = await browser.pages();
  await page.evaluate(() => { globalThis.kept = 5; });
  await browser.disconnect();
  browser = await connect(session);
  [page] = await browser.pages();
  assert.equal(await page.evaluate(() => globalThis.kept), 5);
  await browser.disconnect();
});

test('close leaves; 5 seconds after the last client a browser-only session ends', async (t) => {
  const session = await create(t, {});
  const kept = await create(t, { keepAlive: true });
  for (const s of [session, kept]) {
    const browser = await connect(s);
    await browser.version();
    await browser.close();
  }
  const left = Date.now();
  assert.equal((await get(session.id)).status, 'RUNNING');
  const ended = await within(12000, 'the session ends', async () => {
    const s = await get(session.id);
    return s.status !== 'RUNNING' && s;
  });
  assert.equal(ended.status, 'COMPLETED');
  assert.equal(ended.endReason, 'disconnected');
  assert.ok(Date.now() - left > 3500, `it ended after ${Date.now() - left} ms`);
  assert.equal((await get(kept.id)).status, 'RUNNING');
  const again = await connect(kept); // Browser.close did not end Chrome
  assert.equal((await again.pages()).length, 1);
  await again.close();
});
