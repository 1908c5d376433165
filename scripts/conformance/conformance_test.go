// Package conformance puts real clients in front of Berth, without options of
// their own for it: Playwright, Puppeteer, chrome-remote-interface, ws, an
// xterm and curl by Node's test runner, chromedp from Go.
package conformance

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/remote"

	"github.com/berth-dev/berth/scripts/testenv"
)

var stack = testenv.New(testenv.Options{Pool: "browser=1,shell=2,both=2"})

func TestMain(m *testing.M) { os.Exit(stack.Main(m)) }

// TestNodeClients runs each *.test.mjs as a test of its own.
func TestNodeClients(t *testing.T) {
	env := stack.Start(t)
	install(t)
	files, err := filepath.Glob("*.test.mjs")
	if err != nil || len(files) < 5 {
		t.Fatalf("found %v (%v)", files, err)
	}
	key := env.NewKey(t, "Scale")
	for _, file := range files {
		t.Run(strings.TrimSuffix(file, ".test.mjs"), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, "node", "--test", "--test-reporter=spec", file)
			cmd.Env = append(os.Environ(), "BERTH_URL="+env.BaseURL, "BERTH_KEY="+key, "NODE_NO_WARNINGS=1")
			cmd.WaitDelay = 5 * time.Second
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			if !bytes.Contains(out, []byte("pass ")) || bytes.Contains(out, []byte("pass 0\n")) {
				t.Errorf("no test ran:\n%s", out)
			}
		})
	}
}

// install brings the clients that package-lock.json names, if they are not here.
func install(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("npm"); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	want, err := os.ReadFile("package-lock.json")
	if err != nil {
		t.Fatal(err)
	}
	const mark = "node_modules/.lock" // the lock file that they were installed by
	if have, err := os.ReadFile(mark); err == nil && bytes.Equal(have, want) {
		return
	}
	cmd := exec.Command("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("npm ci: %v\n%s", err, out)
	}
	if err := os.WriteFile(mark, want, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestChromedp connects as chromedp's users do: it resolves what it is given
// through /json/version, unless it is told to take the URL as it is.
func TestChromedp(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	s := c.Create(testenv.Fields{"shell": true})
	c.Output(s.Id, `mkdir -p site && echo '<title>for chromedp</title><input id=i><button id=b onclick="i.value+=1">x</button>' > site/index.html
		cd site && (python3 -m http.server 8124 >/dev/null 2>&1 &) && until curl -sf -o /dev/null http://localhost:8124/; do sleep 0.05; done`)
	for name, options := range map[string][]remote.Option{"resolved": nil, "as it is": {remote.NoModifyURL}} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			browser, stop := remote.NewAllocator(ctx, *s.ConnectUrl, options...)
			defer stop()
			tab, leave := chromedp.NewContext(browser)
			defer leave()
			err := chromedp.Do(tab, chromedp.Navigate("http://localhost:8124/"),
				chromedp.SendKeys(chromedp.CSS("#i"), "typed"), chromedp.Click(chromedp.CSS("#b")))
			if err != nil {
				t.Fatal(err)
			}
			title, err := chromedp.Run(tab, chromedp.Title())
			if err != nil || title != "for chromedp" {
				t.Errorf("title %q, %v", title, err)
			}
			if value, err := chromedp.Run(tab, chromedp.Value(chromedp.CSS("#i"))); err != nil || value != "typed1" {
				t.Errorf("value %q, %v", value, err)
			}
			if shot, err := chromedp.Run(tab, chromedp.CaptureScreenshot()); err != nil || len(shot) < 100 {
				t.Errorf("%d bytes of picture, %v", len(shot), err)
			}
		})
	}
}
