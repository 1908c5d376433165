// Has a page try all ways out that a browser has, for some seconds; addr is a
// web host's. What fails at once has been tried as well.
async addr => {
  const said = {secure: isSecureContext, webTransport: typeof WebTransport === "function", candidates: [], protocols: [], answered: 0};
  const attempt = f => { try { Promise.resolve(f()).catch(() => {}); } catch (e) {} };
  const hint = (rel, href) => document.head.append(Object.assign(document.createElement("link"), {rel, href}));
  const secure = `https://${addr}:8443`, plain = `http://${addr}:8080`;

  // Names are resolved, and connections made, ahead of need.
  for (const name of ["one", "two", "three"]) {
    hint("dns-prefetch", `//${name}.prefetch.test`);
    hint("preconnect", `https://${name}.preconnect.test`);
    attempt(() => fetch(`https://${name}.fetch.test/`, {mode: "no-cors"}));
    new Image().src = `http://${name}.image.test/`;
  }
  for (const rel of ["preconnect", "prefetch", "prerender", "modulepreload"]) hint(rel, secure + "/" + rel);
  document.head.append(Object.assign(document.createElement("script"), {type: "speculationrules",
    textContent: JSON.stringify({prefetch: [{source: "list", urls: [secure + "/speculated"]}]})}));

  // WebRTC: STUN and TURN by address and name, over UDP and TCP; peers that find
  // each other by mDNS; candidates that lead elsewhere.
  const servers = [{urls: [`stun:${addr}:3478`, "stun:stun.test:3478", "stun:127.0.0.1:3478"]},
    {urls: [`turn:${addr}:3478`, "turn:turn.test:3478", `turn:${addr}:3478?transport=tcp`, `turns:${addr}:5349?transport=tcp`], username: "u", credential: "p"}];
  const a = new RTCPeerConnection({iceServers: servers, iceCandidatePoolSize: 4}), b = new RTCPeerConnection({iceServers: servers});
  a.onicecandidate = e => { if (e.candidate) { said.candidates.push(e.candidate.candidate); attempt(() => b.addIceCandidate(e.candidate)); } };
  b.onicecandidate = e => { if (e.candidate) attempt(() => a.addIceCandidate(e.candidate)); };
  a.createDataChannel("x");
  await a.setLocalDescription(await a.createOffer());
  await b.setRemoteDescription(a.localDescription);
  await b.setLocalDescription(await b.createAnswer());
  await a.setRemoteDescription(b.localDescription);
  for (const host of [addr, "127.0.0.1", "2001:db8::1", "8f3ad2ce-7a53-4d52-9e38-1f1f4c9d1f01.local", "peer.test"])
    for (const [kind, port, more] of [["udp", 3478, ""], ["tcp", 8443, " tcptype passive"]])
      attempt(() => a.addIceCandidate({candidate: `candidate:1 1 ${kind} 2122260223 ${host} ${port} typ host${more}`, sdpMid: "0", sdpMLineIndex: 0}));

  // QUIC: by itself, and where a site offers HTTP/3.
  for (const host of [addr, "127.0.0.1", "quic.test"]) attempt(() => {
    const t = new WebTransport(`https://${host}:8443/`, {serverCertificateHashes: [{algorithm: "sha-256", value: new Uint8Array(32)}]});
    t.closed.catch(() => {});
    return t.ready;
  });
  // The rest is TCP: by the listener or not at all.
  for (const base of [addr + ":8443", "ws.test"]) attempt(() => new WebSocket(`wss://${base}/`));
  for (const base of [addr + ":8080", "ws.test:8080"]) attempt(() => new WebSocket(`ws://${base}/`));
  attempt(() => new EventSource(secure + "/source"));
  attempt(() => navigator.sendBeacon(secure + "/beacon", "x"));
  attempt(() => fetch(secure + "/late", {keepalive: true, mode: "no-cors"}));
  for (const odd of ["http://[2001:db8::1]/", "http://[::ffff:10.0.0.1]/", "http://169.254.169.254/", "http://printer.local/", "http://wpad/", "ftp://" + addr])
    attempt(() => fetch(odd, {mode: "no-cors"}));

  const end = Date.now() + 6000;
  for (let i = 0; Date.now() < end; i++) {
    await Promise.race([fetch(`${location.protocol === "https:" ? secure : plain}/own?${i}`, {cache: "no-store"}).then(() => said.answered++, () => {}),
      new Promise(later => setTimeout(later, 2000))]);
    await new Promise(later => setTimeout(later, 200));
  }
  said.protocols = [...new Set(performance.getEntriesByType("resource").map(e => e.nextHopProtocol))];
  said.gathered = a.iceGatheringState;
  a.close();
  b.close();
  return said;
}
