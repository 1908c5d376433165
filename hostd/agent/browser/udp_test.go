package browser

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-rod/rod/lib/proto"

	"github.com/berth-dev/berth/shared/session"
)

// What pages can make Chrome send beside its proxy is UDP: WebRTC and QUIC. The
// slot's rules stop both; these keep Chrome from trying, where they would not.
func TestChromeSendsNoUDP(t *testing.T) {
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var datagrams atomic.Int32
	done := make(chan struct{})
	go func() {
		defer close(done)
		for buf := make([]byte, 2000); ; datagrams.Add(1) {
			if _, _, err := conn.ReadFrom(buf); err != nil {
				return
			}
		}
	}()
	defer func() { conn.Close(); <-done }()
	cfg := testConfig(t)
	cfg.Proxy = "http://127.0.0.1:9" // nobody; loopback itself is not proxied
	r := start(t, cfg)
	c := r.chrome(t)
	var attached proto.TargetAttachToTargetResult
	if err := c.call(within(t, 10*time.Second), proto.TargetAttachToTarget{TargetID: c.pages.ids()[0], Flatten: true}, &attached); err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf(`(async () => {
		const found = [];
		const pc = new RTCPeerConnection({iceServers: [{urls: "stun:%[1]s"}, {urls: "turn:%[1]s", username: "u", credential: "p"}]});
		pc.onicecandidate = e => { if (e.candidate) found.push(e.candidate.candidate); };
		pc.createDataChannel("x");
		await pc.setLocalDescription(await pc.createOffer());
		await new Promise(over => { pc.onicegatheringstatechange = () => pc.iceGatheringState == "complete" && over(); setTimeout(over, 15000); });
		try { const w = new WebTransport("https://%[1]s/"); w.closed.catch(() => {}); await w.ready.catch(() => {}); } catch (e) {}
		return found.join("\n");
	})()`, conn.LocalAddr())
	var answer struct {
		Result struct{ Value json.RawMessage }
	}
	ask := proto.RuntimeEvaluate{Expression: script, AwaitPromise: true}
	if err := c.callOn(within(t, 60*time.Second), string(attached.SessionID), ask, &answer); err != nil {
		t.Fatal(err)
	}
	if n := datagrams.Load(); n != 0 {
		t.Errorf("Chrome sent %d datagrams", n)
	}
	if found := string(answer.Result.Value); strings.Contains(found, " udp ") || found == "" {
		t.Errorf("candidates %s", found)
	}
	for _, flag := range []string{"--disable-quic", "--webrtc-ip-handling-policy=disable_non_proxied_udp"} {
		if !slices.Contains(cfg.args(session.Viewport{Width: 800, Height: 600}), flag) {
			t.Errorf("%s is not given", flag)
		}
	}
}
