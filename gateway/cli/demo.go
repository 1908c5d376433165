package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/cdpclient"
	"github.com/berth-dev/berth/shared/client"
)

type demoCmd struct {
	URL     string        `help:"Base URL of the API." default:"http://${listen}" env:"BERTH_URL" placeholder:"URL"`
	Key     string        `help:"API key. Default: the development key of 'make run'." env:"BERTH_API_KEY" placeholder:"KEY"`
	KeyFile string        `help:"File with the development key." default:"${home}/dev.key" env:"BERTH_KEY_FILE" placeholder:"FILE"`
	Out     string        `help:"Where the screenshot goes." default:"berth-demo.png" placeholder:"FILE"`
	Timeout time.Duration `help:"Give up after that long." default:"2m"`
}

// page is served from inside the session; the click changes what it shows.
const page = `<!doctype html><meta charset="utf-8"><title>Berth</title>
<style>body{margin:0;height:100vh;display:grid;place-content:center;gap:2rem;text-align:center;color:#0b2239;
font:2rem system-ui,"DejaVu Sans",sans-serif;background:linear-gradient(160deg,#e7f0f8,#bfd6ea)}
button{font:inherit;padding:.6em 1.4em;border:0;border-radius:.5em;color:#fff;background:#0b5394}
.done button{background:#38761d}</style>
<div id="say">A page from this session’s own shell.</div><button id="go" onclick="
document.body.className='done';say.textContent='Clicked by a real Chrome. 你好 👋';this.textContent='Done'">Click me</button>`

// demo is one run of the demonstration.
type demo struct {
	api     *client.Client
	session api.Session
	browser *cdpclient.Client
	tab     *cdpclient.Page
	begin   time.Time
}

func (c demoCmd) Run(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, c.Timeout, fmt.Errorf("the demo took longer than %s", c.Timeout))
	defer cancel()
	key, err := c.key()
	if err != nil {
		return err
	}
	d := &demo{api: client.New(c.URL, key, nil), begin: time.Now()}
	fmt.Fprintf(out, "Berth demo on %s\n", c.URL)
	defer d.api.Close()
	defer d.leave(ctx)
	for _, s := range []struct {
		what string
		do   func(context.Context) error
	}{
		{"create a session with browser and shell", d.create},
		{"serve a page from its shell", d.serve},
		{"connect to its Chrome", d.connect},
		{"open the page", func(ctx context.Context) error { return d.tab.Goto(ctx, "http://localhost:8000/") }},
		{"click the button", d.click},
		{"take a screenshot into " + c.Out, func(ctx context.Context) error { return d.shoot(ctx, c.Out) }},
		{"release the session", d.release},
	} {
		if err := step(ctx, s.what, s.do); err != nil {
			return err
		}
	}
	fmt.Fprintf(out, "  %-46s %8s\n", "all together", since(d.begin))
	return nil
}

// step runs one step and prints what took how long.
func step(ctx context.Context, what string, do func(context.Context) error) error {
	begin := time.Now()
	if err := do(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	fmt.Fprintf(out, "  %-46s %8s\n", what, since(begin))
	return nil
}

func since(t time.Time) string { return fmt.Sprintf("%d ms", time.Since(t).Milliseconds()) }

func (c demoCmd) key() (string, error) {
	if c.Key != "" {
		return c.Key, nil
	}
	b, err := os.ReadFile(c.KeyFile)
	if err != nil {
		return "", fmt.Errorf("no API key: give --key, or start Berth with 'make run', which writes %s", c.KeyFile)
	}
	return strings.TrimSpace(string(b)), nil
}

func (d *demo) create(ctx context.Context) (err error) {
	d.session, err = d.api.CreateSession(ctx, api.CreateSession{Shell: client.P(true)}, "")
	return err
}

func (d *demo) serve(ctx context.Context) error {
	if _, err := d.api.WriteFile(ctx, d.session.Id, "site/index.html", strings.NewReader(page)); err != nil {
		return err
	}
	r, err := d.api.Exec(ctx, d.session.Id, api.Exec{Command: `(cd site && exec python3 -m http.server 8000) >/dev/null 2>&1 &
up() { curl -sf -o /dev/null http://localhost:8000/; }
for i in $(seq 100); do up && break; sleep 0.05; done; up`})
	if err == nil && (r.ExitCode == nil || *r.ExitCode != 0) {
		err = fmt.Errorf("the page's server did not start: %s", r.Stderr)
	}
	return err
}

func (d *demo) connect(ctx context.Context) (err error) {
	if d.session.ConnectUrl == nil {
		return fmt.Errorf("the session has no connectUrl")
	}
	if d.browser, err = cdpclient.Dial(ctx, *d.session.ConnectUrl); err != nil {
		return err
	}
	d.tab, err = d.browser.FirstPage(ctx)
	return err
}

func (d *demo) click(ctx context.Context) error {
	if err := d.tab.Click(ctx, "#go"); err != nil {
		return err
	}
	var said string
	if err := d.tab.Evaluate(ctx, "say.textContent", &said); err != nil {
		return err
	}
	if !strings.HasPrefix(said, "Clicked") {
		return fmt.Errorf("the page says %q after the click", said)
	}
	return nil
}

func (d *demo) shoot(ctx context.Context, name string) error {
	png, err := d.tab.Screenshot(ctx)
	if err != nil {
		return err
	}
	abs, err := filepath.Abs(name)
	if err != nil {
		return err
	}
	return os.WriteFile(abs, png, 0o644)
}

func (d *demo) release(ctx context.Context) error {
	id := d.session.Id
	d.session.Id = "" // leave has nothing more to do
	_, err := d.api.Release(ctx, id)
	return err
}

// leave gives back what a failed run still holds.
func (d *demo) leave(ctx context.Context) {
	if d.browser != nil {
		_ = d.browser.Close() // the session may have gone first
	}
	if d.session.Id == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	if _, err := d.api.Release(ctx, d.session.Id); err != nil {
		fmt.Fprintf(os.Stderr, "berth: session %s could not be released: %v\n", d.session.Id, err)
	}
}
