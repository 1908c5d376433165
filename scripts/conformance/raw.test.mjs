// Clients closer to the wire: chrome-remote-interface and ws.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import CDP from 'chrome-remote-interface';
import WebSocket from 'ws';
import { create, call, json, site, url } from './berth.mjs';

test('chrome-remote-interface on connectUrl and on a listed target', async (t) => {
  const session = await create(t, { shell: true });
  const page = await site(session.id);
  const browser = await CDP({ target: session.connectUrl, local: true });
  const { targetInfos } = await browser.Target.getTargets();
  const target = targetInfos.find((x) => x.type === 'page');
  assert.ok(target);
  const { sessionId } = await browser.Target.attachToTarget({ targetId: target.targetId, flatten: true });
  await browser.send('Page.enable', {}, sessionId);
  const loaded = new Promise((r) => browser.on('Page.loadEventFired', (_, id) => id === sessionId && r()));
  await browser.send('Page.navigate', { url: page }, sessionId);
  await loaded;
  const { result } = await browser.send('Runtime.evaluate', { expression: 'document.title' }, sessionId);
  assert.equal(result.value, 'site');

  const query = new URL(session.connectUrl).search;
  const listed = await (await fetch(`${url}/json/list${query}`)).json();
  assert.ok(listed.some((x) => x.type === 'page' && x.url === page && x.webSocketDebuggerUrl));
  const refused = await fetch(`${url}/json/list?sessionId=${session.id}&token=x`);
  assert.equal(refused.status, 401);
  await browser.close();
});

test('refusals come before the upgrade, closes with their code', async (t) => {
  const session = await create(t, {});
  const status = await new Promise((resolve, reject) => {
    const socket = new WebSocket(session.connectUrl + 'x');
    socket.on('unexpected-response', (request, response) => {
      resolve(response.statusCode);
      request.destroy();
    });
    socket.on('open', () => reject(new Error('opened with a wrong token')));
    socket.on('error', () => {}); // of the request that is destroyed
  });
  assert.equal(status, 401);
  const socket = new WebSocket(session.connectUrl);
  await new Promise((r) => socket.on('open', r));
  assert.equal(socket.extensions.length ?? 0, 0);
  const closed = new Promise((r) => socket.on('close', (code, reason) => r([code, String(reason)])));
  await json('POST', `/v1/sessions/${session.id}/release`);
  assert.deepEqual(await closed, [1000, 'released']);
  assert.equal((await call('POST', `/v1/sessions/${session.id}/release`)).status, 409);
});

test('large messages pass both ways', async (t) => {
  const session = await create(t, {});
  const socket = new WebSocket(session.connectUrl, { maxPayload: 300 << 20 });
  await new Promise((r) => socket.on('open', r));
  const waiting = new Map();
  socket.on('message', (data) => {
    const m = JSON.parse(data);
    waiting.get(m.id)?.(m);
  });
  let last = 0;
  const send = (method, params, sessionId) => new Promise((resolve) => {
    waiting.set(++last, resolve);
    socket.send(JSON.stringify({ id: last, method, params, sessionId }));
  });
  const { result: { targetInfos } } = await send('Target.getTargets');
  const targetId = targetInfos.find((x) => x.type === 'page').targetId;
  const { result: { sessionId } } = await send('Target.attachToTarget', { targetId, flatten: true });
  const size = 20 << 20;
  const { result } = await send('Runtime.evaluate', { expression: `globalThis.big = '${'x'.repeat(size)}'; big.length` }, sessionId);
  assert.equal(result.result.value, size);
  const back = await send('Runtime.evaluate', { expression: 'big', returnByValue: true }, sessionId);
  assert.equal(back.result.result.value.length, size);
  socket.close();
});
