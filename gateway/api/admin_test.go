package api

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

type fakeAdmin struct {
	project, plan, revoked string
	window                 accounts.Window
}

func (f *fakeAdmin) CreateKey(_ context.Context, project, plan string) (string, string, error) {
	f.project, f.plan = project, plan
	return "berth_secret", "k1", nil
}

func (f *fakeAdmin) ListKeys(context.Context) ([]AdminKey, error) {
	return []AdminKey{{ID: "k1", ProjectID: "p", Plan: "Free", CreatedAt: t0}}, nil
}

func (f *fakeAdmin) RevokeKey(_ context.Context, id string) error {
	if id != "k1" {
		return apierr.New(apierr.NotFound, "there is no key %s", id)
	}
	f.revoked = id
	return nil
}

func (f *fakeAdmin) Hosts(context.Context) ([]placement.Host, error) {
	return []placement.Host{{Name: "h", Region: "local", Driver: "oci", Free: 3, Warm: map[session.Kind]int{session.Both: 2}}}, nil
}

func (f *fakeAdmin) Usage(_ context.Context, project string, w accounts.Window) ([]AdminUsage, error) {
	if project == "nobody" {
		return nil, apierr.New(apierr.NotFound, "there is no project %q", project)
	}
	f.window = w
	return []AdminUsage{{ProjectID: "p", Plan: "Free", Usage: accounts.Usage{CostUSD: 5, ByDay: []accounts.DayUsage{}}}}, nil
}

func (f *fakeAdmin) Plans(context.Context) ([]AdminPlan, error) {
	return []AdminPlan{{Plan: placement.Plan{Name: "Free", ConcurrentSessions: 3, MaxTimeoutSeconds: 900}, Projects: 1}}, nil
}

func TestAdmin(t *testing.T) {
	admin := &fakeAdmin{}
	srv, err := New(Config{Admin: admin, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "admin.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.ServeAdmin(ln) }()
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := srv.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", path) }}}
	for _, tt := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"POST", "/admin/keys", `{"project":"acme","plan":"Hobby"}`, 201, `{"id":"k1","key":"berth_secret","projectId":"acme"}`},
		{"POST", "/admin/keys", `{"project":"a b"}`, 400, "project: must be"},
		{"POST", "/admin/keys", `{"name":"x"}`, 400, "invalid_request"},
		{"GET", "/admin/keys", "", 200, `{"data":[{"id":"k1","projectId":"p","plan":"Free","createdAt":"2026-01-02T03:04:05.6789Z","revokedAt":null}]}`},
		{"DELETE", "/admin/keys/k1", "", 204, ""},
		{"DELETE", "/admin/keys/k2", "", 404, "there is no key k2"},
		{"GET", "/admin/hosts", "", 200, `{"data":[{"name":"h","region":"local","driver":"oci","free":3,"warm":{"both":2}}]}`},
		{"GET", "/admin/usage?project=p&from=2026-01-02&to=2026-02-03T04:05:06%2B01:00", "", 200, `"projectId":"p","plan":"Free","sessions":0,"browserSeconds":0,`},
		{"GET", "/admin/usage?project=nobody", "", 404, "there is no project"},
		{"GET", "/admin/usage?from=yesterday", "", 400, "from: "},
		{"GET", "/admin/usage?from=2026-01-02&to=2026-01-02", "", 400, "from: 2026-01-02T00:00:00Z must be before"},
		{"GET", "/admin/plans", "", 200, `{"data":[{"name":"Free","concurrentSessions":3,"maxTimeoutSeconds":900,"proxyGbPerMonth":null,"projects":1}]}`},
		{"GET", "/v1/sessions", "", 404, "not_found"},
	} {
		req, _ := http.NewRequest(tt.method, "http://admin"+tt.path, strings.NewReader(tt.body))
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != tt.status || !strings.Contains(string(b), tt.want) {
			t.Errorf("%s %s: %d %s", tt.method, tt.path, resp.StatusCode, b)
		}
	}
	if admin.project != "acme" || admin.plan != "Hobby" || admin.revoked != "k1" {
		t.Errorf("the use cases saw %+v", admin)
	}
	if want := time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC); !admin.window.From.Equal(want) || !admin.window.To.Equal(time.Date(2026, 2, 3, 3, 5, 6, 0, time.UTC)) {
		t.Errorf("the window was %+v", admin.window)
	}
}

func TestLivePage(t *testing.T) {
	r := newRig(t)
	a := r.do("GET", "/live/"+goodID+"?token=l", nil, "X-Api-Key", "")
	csp := a.header.Get("Content-Security-Policy")
	_, nonce, _ := strings.Cut(csp, "'nonce-")
	nonce, _, _ = strings.Cut(nonce, "'")
	if a.status != 200 || nonce == "" || !strings.Contains(string(a.body), `<script nonce="`+nonce+`"`) || !strings.Contains(csp, "frame-ancestors 'self'") {
		t.Errorf("%d %s %.300s", a.status, csp, a.body)
	}
	if b := r.do("GET", "/live/"+goodID+"?token=l", nil); b.header.Get("Content-Security-Policy") == csp {
		t.Error("the same nonce twice")
	}
	if a := r.do("GET", "/live/"+goodID+"?token=c", nil); a.status != 401 {
		t.Errorf("another purpose's token: %d", a.status)
	}
}
