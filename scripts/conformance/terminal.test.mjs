// The terminal, seen by a real terminal emulator.
import assert from 'node:assert/strict';
import { test } from 'node:test';
import WebSocket from 'ws';
import xterm from '@xterm/headless';
import { create, file, put, url, within } from './berth.mjs';

// open joins an emulator of a size to a session's terminal.
async function open(t, session, cols, rows) {
  const terminal = new xterm.Terminal({ cols, rows, allowProposedApi: true });
  const socket = new WebSocket(url.replace('http', 'ws') + session.terminalUrl);
  t.after(() => socket.terminate());
  await new Promise((resolve, reject) => socket.on('open', resolve).on('error', reject));
  socket.on('message', (data, binary) => {
    assert.ok(binary, 'output comes in binary frames');
    terminal.write(data);
  });
  const closed = new Promise((r) => socket.on('close', (code, reason) => r([code, String(reason)])));
  const send = (frame) => socket.send(JSON.stringify(frame));
  terminal.onData((data) => send({ type: 'input', data })); // answers to the program's questions
  const resize = (c, r) => {
    terminal.resize(c, r);
    send({ type: 'resize', cols: c, rows: r });
  };
  resize(cols, rows);
  const type = (data) => send({ type: 'input', data });
  const line = (n) => terminal.buffer.active.getLine(terminal.buffer.active.baseY + n)?.translateToString(true) ?? '';
  const screen = () => Array.from({ length: terminal.rows }, (_, n) => line(n));
  const shows = (what, check) => within(10000, what, () => check(screen())).catch((e) => {
    throw new Error(`${e.message}\n${screen().join('\n')}`);
  });
  return { terminal, type, resize, shows, closed, line };
}

const numbers = Array.from({ length: 100 }, (_, i) => `line ${i + 1} of a hundred`).join('\n') + '\n';

test('vim draws, edits, follows a resize and saves', async (t) => {
  const session = await create(t, { browser: false, shell: true });
  await put(session.id, 'text', numbers);
  const x = await open(t, session, 80, 24);
  x.type('vim -u NONE -N text\r');
  await x.shows('vim fills the screen', (s) => s[0] === 'line 1 of a hundred' && s[22] === 'line 23 of a hundred' && /100L|100 lines/.test(s[23]));
  assert.equal(x.terminal.buffer.active.type, 'alternate');
  x.type('50Gzt');
  await x.shows('line 50 on top', (s) => s[0] === 'line 50 of a hundred');
  x.type('gg');
  await x.shows('back at the top', (s) => s[0] === 'line 1 of a hundred');
  x.resize(60, 40);
  await x.shows('it uses the new rows', (s) => s.length === 40 && s[38] === 'line 39 of a hundred');
  x.type('Oinserted ünï ☃\x1b:wq\r');
  await x.shows('vim has gone', () => x.terminal.buffer.active.type === 'normal');
  assert.equal(String(await file(session.id, 'text')).split('\n')[0], 'inserted ünï ☃');
  x.type('exit 3\r');
  assert.deepEqual(await x.closed, [1000, 'exit:3']);
});

test('less pages; a second client sees the same', async (t) => {
  const session = await create(t, { browser: false, shell: true });
  await put(session.id, 'text', numbers);
  const x = await open(t, session, 100, 30);
  x.type('less text\r');
  await x.shows('the first page', (s) => s[0] === 'line 1 of a hundred' && s[28] === 'line 29 of a hundred');
  x.type(' ');
  await x.shows('the second page', (s) => s[0] === 'line 30 of a hundred');
  x.type('G');
  await x.shows('the end', (s) => s[28] === 'line 100 of a hundred');
  const y = await open(t, session, 100, 30);
  await y.shows('the replayed screen', (s) => s[28] === 'line 100 of a hundred');
  x.type('q');
  x.type('clear; stty size; tput cols; echo $TERM\r');
  await x.shows('its size', (s) => s[0] === '30 100' && s[1] === '100' && s[2].startsWith('xterm'));
  await y.shows('the same for the second', (s) => s[0] === '30 100');
});
