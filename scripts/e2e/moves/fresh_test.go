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

// draw prints one random thing a line, its name first. It starts no program,
// since that is what takes an emulated machine long. Bash draws SRANDOM by
// getrandom(2).
const draw = `echo now ${EPOCHREALTIME/./}000
echo shell $RANDOM-$RANDOM-$RANDOM-$RANDOM-$RANDOM
echo srandom $SRANDOM-$SRANDOM-$SRANDOM-$SRANDOM
read -r drawn </proc/sys/kernel/random/uuid; echo uuid $drawn
read -r drawn </proc/sys/kernel/random/boot_id; echo boot $drawn
read -r drawn </etc/machine-id; echo machine $drawn
`

// drawNew is also what new programs draw.
const drawNew = draw + `echo newshell $(bash -c 'echo $RANDOM-$RANDOM-$RANDOM-$RANDOM-$RANDOM')
echo urandom $(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')
`

// drawMore is also what programs draw that take long to start.
const drawMore = drawNew + `echo openssl $(openssl rand -hex 16)
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
	create(t, c, shellOnly) // makes the template
	// Of so many sessions one draws with new programs, or with all.
	const n = 200
	some, all := soak(3, 1), soak(12, 1)
	d := newDrawn()
	var wg sync.WaitGroup
	next := make(chan int)
	began := time.Now()
	for range 2 {
		wg.Go(func() {
			for i := range next {
				command := draw
				switch {
				case i%all == 0:
					command = drawMore
				case i%some == 0:
					command = drawNew
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
	d.wholly(t, n, "shell", "srandom", "uuid", "boot", "machine")
	d.wholly(t, (n+some-1)/some, "newshell", "urandom")
	d.wholly(t, (n+all-1)/all, "openssl", "getrandom", "python", "pyuuid", "tls", "node", "nodecrypto")
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
	create(t, env.Client(t, "Scale"), withBrowser) // makes the template
	n := soak(20, 200)
	d := newDrawn()
	began := time.Now()
	t.Run("sessions", func(t *testing.T) {
		for i := range n {
			t.Run(strconv.Itoa(i), func(t *testing.T) {
				t.Parallel()
				drawInPages(t, env, d)
			})
		}
	})
	d.wholly(t, 2*n, "target", "cdp", "math", "crypto")
	t.Logf("%d browsers in %s; a clock outside its request by %s at most", n, time.Since(began).Round(time.Second), d.off)
}

// withBrowser is of the kind that the moves have a template of.
var withBrowser = testenv.Fields{"shell": true, "timeout": 800}

// drawInPages has the page that a session begins with draw, and one opened later.
func drawInPages(t *testing.T, env *testenv.Env, d *drawn) {
	c := env.Client(t, "Scale")
	s := create(t, c, withBrowser)
	cdp, first := attach(t, *s.ConnectUrl)
	var opened struct{ TargetID string }
	if err := cdp.Call(within(t, time.Minute), "", "Target.createTarget", map[string]string{"url": "about:blank"}, &opened); err != nil {
		t.Fatal(err)
	}
	second, err := cdp.Attach(within(t, time.Minute), opened.TargetID)
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range []*cdpclient.Page{first, second} {
		d.add(t, s.Id, "target", page.TargetID)
		d.add(t, s.Id, "cdp", page.SessionID)
		d.draws(t, s.Id, page)
	}
	c.Release(s.Id)
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
