// curl: what README shows and what scripts do.
import assert from 'node:assert/strict';
import { execFile, spawn } from 'node:child_process';
import { mkdtemp, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { test } from 'node:test';
import { promisify } from 'node:util';
import { create, key, url, within } from './berth.mjs';

const run = promisify(execFile);
const curl = async (...args) => (await run('curl', ['-sS', '--max-time', '60', '-H', `x-api-key: ${key}`, ...args], { encoding: 'buffer', maxBuffer: 64 << 20 })).stdout;
const post = (path, body, ...more) => curl(url + path, '-H', 'content-type: application/json', '-d', JSON.stringify(body), ...more);

async function folder(t) {
  const dir = await mkdtemp(join(tmpdir(), 'berth-curl-'));
  t.after(() => rm(dir, { recursive: true }));
  return dir;
}

test('exec, and both spellings of the key', async (t) => {
  const session = await create(t, { browser: false, shell: true });
  const got = JSON.parse(await post(`/v1/sessions/${session.id}/exec`, { command: 'echo $((6*7))' }));
  assert.equal(got.stdout, '42\n');
  const me = (await run('curl', ['-sS', '-H', `Authorization: Bearer ${key}`, `${url}/v1/auth/me`])).stdout;
  assert.ok(JSON.parse(me).project.id);
  const { stdout } = await run('curl', ['-sS', '-w', '%{http_code}', `${url}/v1/auth/me`]);
  assert.match(stdout, /"code":\s*"unauthorized".*401$/s);
});

test('files up, down, by range, resumed', async (t) => {
  const session = await create(t, { browser: false, shell: true });
  const dir = await folder(t);
  const bytes = Buffer.alloc(3_000_000, 'abcdefghij');
  await writeFile(join(dir, 'up'), bytes);
  const path = `${url}/v1/sessions/${session.id}/files?path=deep/file.bin`;
  const put = JSON.parse(await curl('-T', join(dir, 'up'), path)); // chunked or not, with Expect: 100-continue
  assert.deepEqual(put, { path: '/workspace/deep/file.bin', size: 3_000_000 });
  const chunked = JSON.parse(await curl('-X', 'PUT', '-H', 'transfer-encoding: chunked', '--data-binary', `@${join(dir, 'up')}`, path));
  assert.equal(chunked.size, 3_000_000);
  assert.ok((await curl(path)).equals(bytes));
  assert.equal(String(await curl('-r', '5-14', path)), 'fghijabcde');
  await writeFile(join(dir, 'part'), bytes.subarray(0, 1_234_567));
  await curl('-C', '-', '-o', join(dir, 'part'), path);
  assert.ok((await readFile(join(dir, 'part'))).equals(bytes));
  const head = String(await curl('-D', '-', '-o', '/dev/null', '-r', '0-0', path));
  assert.match(head, /^HTTP\/1\.1 206/);
  assert.match(head, /content-range: bytes 0-0\/3000000/i);
  assert.match(head, /x-request-id: \S+/i);
});

// lines follows a curl that streams, and stops it with the test.
function lines(t, ...args) {
  const child = spawn('curl', ['-sSN', '-H', `x-api-key: ${key}`, ...args], { stdio: ['ignore', 'pipe', 'inherit'] });
  t.after(() => child.kill());
  const seen = [];
  createInterface(child.stdout).on('line', (text) => seen.push({ text, at: Date.now() }));
  return { seen, ended: new Promise((r) => child.on('close', r)) };
}

test('NDJSON comes as it is printed', async (t) => {
  const session = await create(t, { browser: false, shell: true });
  const { seen, ended } = lines(t, `${url}/v1/sessions/${session.id}/exec`, '-H', 'content-type: application/json',
    '-d', JSON.stringify({ command: 'for i in 1 2 3; do echo $i; sleep 0.4; done; exit 2', stream: true }));
  assert.equal(await ended, 0);
  const parsed = seen.map((l) => JSON.parse(l.text));
  assert.equal(parsed.filter((l) => l.type === 'stdout').map((l) => l.data).join(''), '1\n2\n3\n');
  const last = parsed.at(-1);
  assert.deepEqual([last.type, last.exitCode, last.timedOut], ['exit', 2, false]);
  assert.ok(seen.at(-1).at - seen[0].at > 700, 'all came at once');
});

test('server-sent events, resumed', async (t) => {
  const session = await create(t, { browser: false, shell: true });
  const path = `/v1/sessions/${session.id}`;
  const first = lines(t, `${url}${path}/events/stream?types=exec&after=0`);
  await within(5000, 'the stream is open', () => first.seen.some((l) => l.text === 'retry: 1000'));
  await post(`${path}/exec`, { command: 'true' });
  const id = await within(5000, 'an event', () => first.seen.find((l) => l.text.startsWith('id: '))?.text.slice(4));
  await post(`${path}/exec`, { command: 'false' });
  const second = lines(t, `${url}${path}/events/stream?types=exec`, '-H', `Last-Event-ID: ${id}`);
  const data = await within(5000, 'the event after', () => second.seen.find((l) => l.text.startsWith('data: '))?.text.slice(6));
  const event = JSON.parse(data);
  assert.equal(event.type, 'exec');
  assert.equal(event.data.exitCode, 1);
  assert.ok(event.seq > Number(id));
  await post(`${path}/release`, {});
  assert.equal(await second.ended, 0); // the stream of an ended session closes
});
