package e2e

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/cdpclient"
)

// statusOf asks a signed URL without a key.
func statusOf(t *testing.T, rawURL string, header ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(within(t, 20*time.Second), http.MethodGet, strings.Replace(rawURL, "ws://", "http://", 1), nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if resp.StatusCode != http.StatusSwitchingProtocols && err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

var upgrade = []string{"Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "AQIDBAUGBwgJCgsMDQ4PEA=="}

func TestSignedURLs(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	s := c.Create(testenv.Fields{"shell": true})
	old := []string{*s.ConnectUrl, strings.Replace(*s.ConnectUrl, "/v1/connect", "/json/version", 1), s.LiveUrl, env.BaseURL + *s.TerminalUrl}
	cdp, err := cdpclient.Dial(within(t, 20*time.Second), *s.ConnectUrl)
	if err != nil {
		t.Fatal(err)
	}

	status, page := statusOf(t, s.LiveUrl)
	if status != http.StatusOK || !strings.Contains(strings.ToLower(page), "<html") {
		t.Errorf("live view: %d %.200s", status, page)
	}
	status, version := statusOf(t, old[1])
	if status != http.StatusOK || !strings.Contains(version, `"webSocketDebuggerUrl"`) || !strings.Contains(version, "/v1/connect?sessionId="+s.Id) {
		t.Errorf("/json/version: %d %s", status, version)
	}
	for _, bad := range []string{old[0] + "x", strings.Split(old[0], "&token=")[0], strings.Replace(*s.TerminalUrl, "terminal?token=", "terminal?token=A", 1)} {
		if !strings.Contains(bad, "://") {
			bad = env.BaseURL + bad
		}
		if status, body := statusOf(t, bad, upgrade...); status != http.StatusUnauthorized {
			t.Errorf("%s: %d %s, want 401 before any upgrade", bad, status, body)
		}
	}
	// A token for one thing opens no other.
	if status, _ := statusOf(t, env.BaseURL+"/live/"+s.Id+"?token="+strings.Split(old[0], "&token=")[1]); status != http.StatusUnauthorized {
		t.Errorf("connectUrl's token opened the live view: %d", status)
	}

	var fresh api.LiveUrls
	c.Want(http.StatusOK, http.MethodGet, "/v1/sessions/"+s.Id+"/live", nil, &fresh)
	if status, _ := statusOf(t, fresh.LiveUrl); status != http.StatusOK {
		t.Errorf("fresh liveUrl: %d", status)
	}

	var kept, cut api.SessionUrls
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/rotate-urls", nil, &kept)
	for _, u := range old {
		if status, body := statusOf(t, u, upgrade...); status != http.StatusUnauthorized {
			t.Errorf("after rotation %s: %d %s", u, status, body)
		}
	}
	if err := cdp.Call(within(t, 10*time.Second), "", "Browser.getVersion", nil, nil); err != nil {
		t.Errorf("rotation without disconnect cut a present client: %v", err)
	}
	second, err := cdpclient.Dial(within(t, 20*time.Second), *kept.ConnectUrl)
	if err != nil {
		t.Fatal(err)
	}
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/rotate-urls", testenv.Fields{"disconnect": true}, &cut)
	for i, client := range []*cdpclient.Client{cdp, second} {
		select {
		case <-client.Done():
			if got := client.CloseStatus(); got != 1008 {
				t.Errorf("client %d: close code %d (%v), want 1008", i, got, client.Err())
			}
		case <-time.After(5 * time.Second):
			t.Errorf("client %d was not cut", i)
		}
	}
	third, err := cdpclient.Dial(within(t, 20*time.Second), *cut.ConnectUrl)
	if err != nil {
		t.Fatal(err)
	}
	c.Release(s.Id)
	select {
	case <-third.Done():
		if got := third.CloseStatus(); got != 1000 {
			t.Errorf("release closed with %d (%v), want 1000", got, third.Err())
		}
	case <-time.After(5 * time.Second):
		t.Error("release left a socket open")
	}
	if status, _ := statusOf(t, *cut.ConnectUrl, upgrade...); status != http.StatusConflict {
		t.Errorf("connectUrl of an ended session: %d, want 409", status)
	}
}
