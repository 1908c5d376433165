// The few calls to Berth's own API that the clients' tests need.
import assert from 'node:assert/strict';

export const url = process.env.BERTH_URL;
export const key = process.env.BERTH_KEY;
assert.ok(url && key, 'BERTH_URL and BERTH_KEY say where Berth is; conformance_test.go sets them');

export async function call(method, path, body) {
  const raw = body instanceof Uint8Array;
  const headers = { 'x-api-key': key };
  if (body !== undefined) headers['content-type'] = raw ? 'application/octet-stream' : 'application/json';
  return fetch(url + path, { method, headers, body: body === undefined || raw ? body : JSON.stringify(body) });
}

export async function json(method, path, body) {
  const response = await call(method, path, body);
  const text = await response.text();
  assert.ok(response.ok, `${method} ${path}: ${response.status} ${text}`);
  return text ? JSON.parse(text) : undefined;
}

// create starts a session that ends with the test.
export async function create(t, fields) {
  const session = await json('POST', '/v1/sessions', fields);
  t.after(() => call('DELETE', `/v1/sessions/${session.id}`));
  return session;
}

export const get = (id) => json('GET', `/v1/sessions/${id}`);

export async function sh(id, command) {
  const r = await json('POST', `/v1/sessions/${id}/exec`, { command });
  assert.equal(r.exitCode, 0, `${command}: ${JSON.stringify(r)}`);
  return r.stdout;
}

export const put = (id, path, bytes) =>
  json('PUT', `/v1/sessions/${id}/files?path=${encodeURIComponent(path)}`, Buffer.from(bytes));

export async function file(id, path) {
  const response = await call('GET', `/v1/sessions/${id}/files?path=${encodeURIComponent(path)}`);
  assert.equal(response.status, 200, path);
  return Buffer.from(await response.arrayBuffer());
}

const page = `<!doctype html><title>site</title>
<h1 id=head>Hello</h1>
<form onsubmit="event.preventDefault(); document.querySelector('#out').textContent = 'hi ' + name.value">
<input id=name name=name><button id=go>go</button></form><p id=out></p>
<a id=get href=report.csv download="the report.csv">get</a>
<input id=up type=file multiple onchange="Promise.all([...this.files].map(async f => f.name + '=' + await f.text())).then(a => document.querySelector('#out').textContent = a.join())">
`;

// site serves a page from inside the session, as its own python would.
export async function site(id) {
  await put(id, 'site/index.html', page);
  await put(id, 'site/report.csv', 'a,b\n1,2\n');
  await sh(id, `cd site && (python3 -m http.server 8123 >/dev/null 2>&1 &) && cd .. &&
    until curl -sf -o /dev/null http://localhost:8123/; do sleep 0.05; done`);
  return 'http://localhost:8123/';
}

// within polls until check gives something, and gives that.
export async function within(ms, what, check) {
  for (const end = Date.now() + ms; ;) {
    const got = await check();
    if (got) return got;
    assert.ok(Date.now() < end, `not within ${ms} ms: ${what}`);
    await new Promise((r) => setTimeout(r, 100));
  }
}
