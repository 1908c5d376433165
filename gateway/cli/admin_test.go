package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-dev/berth/shared/apierr"
)

// gateway answers at an admin socket; the result is its folder.
func gateway(t *testing.T, handle http.HandlerFunc) adminFlags {
	home, err := os.MkdirTemp("", "berth") // short: a socket's path has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("unix", filepath.Join(home, "admin.sock"))
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: handle}
	done := make(chan struct{})
	go func() { defer close(done); _ = srv.Serve(ln) }()
	t.Cleanup(func() { srv.Close(); <-done; os.RemoveAll(home) })
	return adminFlags{Home: home}
}

// said gives what a command printed.
func said(t *testing.T, run func() error) (string, error) {
	var b bytes.Buffer
	was := out
	out = &b
	defer func() { out = was }()
	err := run()
	return b.String(), err
}

func TestKeys(t *testing.T) {
	flags := gateway(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.Method + " " + r.URL.EscapedPath() {
		case "POST /admin/keys":
			var in map[string]string
			if err := json.NewDecoder(r.Body).Decode(&in); err != nil || in["project"] != "p" || in["plan"] != "scale" {
				t.Errorf("%v %v", in, err)
			}
			_, _ = w.Write([]byte(`{"key":"berth_secret","id":"key_1","projectId":"p"}`))
		case "GET /admin/keys":
			_, _ = w.Write([]byte(`{"data":[{"id":"key_1","projectId":"p","plan":"Scale","createdAt":"2026-01-02T03:04:05Z"},
				{"id":"key_2","projectId":"p","plan":"Scale","createdAt":"2026-01-02T03:04:05Z","revokedAt":"2026-02-03T04:05:06Z"}]}`))
		case "DELETE /admin/keys/key%2F9":
			e := apierr.New(apierr.NotFound, "there is no key key/9")
			w.WriteHeader(e.Status())
			_ = json.NewEncoder(w).Encode(e)
		default:
			t.Errorf("asked for %s %s", r.Method, r.URL)
		}
	})
	got, err := said(t, func() error { return keysCreateCmd{flags, "p", "scale"}.Run(t.Context()) })
	if err != nil || got != "berth_secret\n" {
		t.Errorf("create: %q %v", got, err)
	}
	got, err = said(t, func() error { return keysListCmd{flags}.Run(t.Context()) })
	if lines := strings.Split(got, "\n"); err != nil || len(lines) != 4 || !strings.HasPrefix(lines[0], "ID ") ||
		!strings.HasSuffix(lines[1], "good") || !strings.Contains(lines[2], "revoked 2026-02-03 04:05:06") {
		t.Errorf("list:\n%s%v", got, err)
	}
	asJSON := flags
	asJSON.JSON = true
	got, err = said(t, func() error { return keysListCmd{asJSON}.Run(t.Context()) })
	if err != nil || !json.Valid([]byte(got)) {
		t.Errorf("list --json: %s %v", got, err)
	}
	if err := (keysRevokeCmd{flags, "key/9"}).Run(t.Context()); err == nil || err.Error() != "there is no key key/9" {
		t.Errorf("revoke: %v", err)
	}
}

func TestHosts(t *testing.T) {
	flags := gateway(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"data":[{"name":"h1","region":"local","driver":"oci","free":7,"warm":{"browser":4,"both":1}}]}`))
	})
	got, err := said(t, func() error { return hostsCmd{flags}.Run(t.Context()) })
	if fields := strings.Fields(strings.Split(got, "\n")[1]); err != nil || strings.Join(fields, " ") != "h1 local oci 7 4 0 1" {
		t.Errorf("%s%v", got, err)
	}
}

func TestWhereNoGatewayIs(t *testing.T) {
	missing := adminFlags{Home: t.TempDir()}
	killed := gateway(t, nil)
	socket := filepath.Join(killed.Home, "admin.sock")
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false) // as kill -9 leaves it
	ln.Close()
	for name, flags := range map[string]adminFlags{"missing": missing, "killed": killed} {
		err := hostsCmd{flags}.Run(t.Context())
		if err == nil || !strings.Contains(err.Error(), "no gateway runs here") || !strings.Contains(err.Error(), "--home") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDemoWithoutKeyOrGateway(t *testing.T) {
	c := demoCmd{KeyFile: filepath.Join(t.TempDir(), "dev.key")}
	if _, err := c.key(); err == nil || !strings.Contains(err.Error(), "--key") || !strings.Contains(err.Error(), c.KeyFile) {
		t.Errorf("%v", err)
	}
	if err := os.WriteFile(c.KeyFile, []byte("berth_x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if key, err := c.key(); err != nil || key != "berth_x" {
		t.Errorf("%q %v", key, err)
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		e := apierr.New(apierr.Unauthorized, "x-api-key: not a key of this cluster")
		w.WriteHeader(e.Status())
		_ = json.NewEncoder(w).Encode(e)
	}))
	defer srv.Close()
	c.URL, c.Timeout = srv.URL, 1e10
	_, err := said(t, func() error { return c.Run(t.Context()) })
	if !apierr.Is(err, apierr.Unauthorized) || strings.Contains(err.Error(), "berth_x") || errors.Unwrap(err) == nil {
		t.Errorf("%v", err)
	}
}
