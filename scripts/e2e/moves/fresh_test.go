package moves

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/cdpclient"
)

// draw prints one random thing a line, its name first. The default shell was
// there when the template was captured, if any was; the programs are new.
const draw = `echo now $(date +%s%N)
echo shell $RANDOM-$RANDOM-$RANDOM-$RANDOM-$RANDOM-$SRANDOM
echo newshell $(bash -c 'echo $RANDOM-$RANDOM-$RANDOM-$RANDOM-$RANDOM')
echo urandom $(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
echo uuid $(cat /proc/sys/kernel/random/uuid)
echo boot $(cat /proc/sys/kernel/random/boot_id)
echo machine $(cat /etc/machine-id)
`

// drawMore is what programs draw that take long to start.
const drawMore = draw + `echo openssl $(openssl rand -hex 16)
python3 - <<'P'
import os, random, ssl, uuid
print('getrandom', os.getrandom(16).hex())
print('python', random.getrandbits(128))
print('pyuuid', uuid.uuid4())
tls, out = ssl.create_default_context(), ssl.MemoryBIO()
try: tls.wrap_bio(ssl.MemoryBIO(), out, server_hostname='example.com').do_handshake()
except ssl.SSLWantReadError: pass
print('tls', out.read()[11:43].hex())
P
node -e 'console.log("node", Math.random()); console.log("nodecrypto", crypto.randomUUID())'
`

// drawn collects random things of many sessions. Safe for concurrent use.
type drawn struct {
	mu    sync.Mutex
	seen  map[string]string // "name value" to the session that drew it
	names map[string]int    // how many of each name
	off   time.Duration     // how far a clock was off at most
}

func newDrawn() *drawn { return &drawn{seen: map[string]string{}, names: map[string]int{}} }

func (d *drawn) add(t *testing.T, session, name, value string) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.names[name]++
	key := name + " " + value
	if value == "" {
		t.Errorf("session %s drew no %s", session, name)
	} else if before, ok := d.seen[key]; ok {
		t.Errorf("sessions %s and %s both drew %s", before, session, key)
	}
	d.seen[key] = session
}

// lines takes in what draw printed. The clock stood between two times here.
func (d *drawn) lines(t *testing.T, session, text string, after, before time.Time) {
	t.Helper()
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name != "now" {
			d.add(t, session, name, value)
			continue
		}
		nanos, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			t.Errorf("session %s: %v", session, err)
		}
		now := time.Unix(0, nanos)
		off := max(after.Sub(now), now.Sub(before))
		if off > 50*time.Millisecond {
			t.Errorf("session %s: asked between %s and %s, the clock said %s: off by %s", session,
				after.Format(clockFormat), before.Format(clockFormat), now.Format(clockFormat), off)
		}
		d.mu.Lock()
		d.off = max(d.off, off)
		d.mu.Unlock()
	}
}

const clockFormat = "15:04:05.000"

// wholly wants as many of every name.
func (d *drawn) wholly(t *testing.T, n int, names ...string) {
	t.Helper()
	for _, name := range names {
		if d.names[name] != n {
			t.Errorf("%d sessions drew %d of %s", n, d.names[name], name)
		}
	}
}

// No two sessions of one template draw the same random number or have an id in
// common, and their clocks are right.
func TestClonesAreFresh(t *testing.T) {
	env := memory.Start(t)
	c := env.Client(t, "Scale")
	create(t, c, shellOnly)               // makes the template
	n, each := soak(60, 200), soak(12, 1) // of each so many one draws with all programs
	d := newDrawn()
	var wg sync.WaitGroup
	next := make(chan int)
	began := time.Now()
	for range 2 {
		wg.Go(func() {
			for i := range next {
				command := draw
				if i%each == 0 {
					command = drawMore
				}
				if err := drawOne(t, c, d, command); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	d.wholly(t, n, "shell", "newshell", "urandom", "uuid", "boot", "machine")
	d.wholly(t, (n+each-1)/each, "openssl", "getrandom", "python", "pyuuid", "tls", "node", "nodecrypto")
	t.Logf("%d sessions in %s; a clock outside its request by %s at most", n, time.Since(began).Round(time.Second), d.off)
}

// drawOne starts a session, has it draw, and ends it. The time is asked for by
// itself, since the other things take a while.
func drawOne(t *testing.T, c *testenv.Client, d *drawn, command string) error {
	var s api.Session
	if err := c.TryInto(within(t, patient), http.StatusCreated, http.MethodPost, "/v1/sessions", shellOnly, &s); err != nil {
		return err
	}
	clock, rest, _ := strings.Cut(command, "\n")
	for _, part := range []string{clock, rest} {
		var r struct{ Stdout, Stderr string }
		after := time.Now()
		err := c.TryInto(within(t, time.Minute), http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/exec", testenv.Fields{"command": part}, &r)
		if err != nil {
			return err
		}
		if r.Stderr != "" {
			return fmt.Errorf("session %s: %s", s.Id, r.Stderr)
		}
		d.lines(t, s.Id, r.Stdout, after, time.Now())
	}
	return c.TryInto(within(t, time.Minute), http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/release", nil, nil)
}

// The same for browsers: what a new page draws, and the ids of Chrome.
func TestClonedBrowsersAreFresh(t *testing.T) {
	env := memory.Start(t)
	c := env.Client(t, "Scale")
	n := soak(3, 20)
	d := newDrawn()
	for range n {
		s := create(t, c, testenv.Fields{"shell": true, "timeout": 800}) // of the kind that the moves have a template of
		cdp, first := attach(t, *s.ConnectUrl)
		d.add(t, s.Id, "target", first.TargetID)
		d.add(t, s.Id, "cdp", first.SessionID)
		d.draws(t, s.Id, first)
		var opened struct{ TargetID string }
		if err := cdp.Call(within(t, time.Minute), "", "Target.createTarget", map[string]string{"url": "about:blank"}, &opened); err != nil {
			t.Fatal(err)
		}
		page, err := cdp.Attach(within(t, time.Minute), opened.TargetID)
		if err != nil {
			t.Fatal(err)
		}
		d.add(t, s.Id, "target", page.TargetID)
		d.add(t, s.Id, "cdp", page.SessionID)
		d.draws(t, s.Id, page)
		c.Release(s.Id)
	}
	d.wholly(t, 2*n, "target", "cdp", "math", "crypto")
	t.Logf("%d browsers; a clock outside its request by %s at most", n, d.off)
}

// draws has a page draw.
func (d *drawn) draws(t *testing.T, session string, p *cdpclient.Page) {
	t.Helper()
	var pair struct{ Now, Math, Crypto string }
	after := time.Now()
	err := p.Evaluate(within(t, time.Minute), `({Now: "now " + Date.now() + "000000", Math: [1, 2, 3].map(Math.random).join("-"),
		Crypto: [...crypto.getRandomValues(new Uint8Array(16))].join("-")})`, &pair)
	if err != nil {
		t.Fatal(err)
	}
	// Date.now drops less than a millisecond.
	d.lines(t, session, pair.Now, after.Add(-time.Millisecond), time.Now())
	d.add(t, session, "math", pair.Math)
	d.add(t, session, "crypto", pair.Crypto)
}
