package accounts

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/token"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func record(t testing.TB) *placement.Record {
	t.Helper()
	r, err := placement.Open(placement.Config{Name: "gw", Home: t.TempDir(), Addr: "127.0.0.1:0", Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Election: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := r.WaitLeader(ctx); err != nil {
		t.Fatal(err)
	}
	if err := r.SetPlans(ctx, DefaultPlans()); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestAuthenticate(t *testing.T) {
	ctx := context.Background()
	r := record(t)
	secret := token.NewAPIKey()
	key, err := r.PutKey(ctx, placement.Project{ID: "p", Name: "Pea", Plan: "Hobby"}, placement.Key{Hash: secret.Hash()})
	if err != nil {
		t.Fatal(err)
	}
	text := secret.Plaintext(r.View().Index())
	c, err := Authenticate(ctx, r, text)
	if err != nil || c.ProjectID != "p" || c.KeyID != key.ID || c.Plan.Name != "Hobby" || c.Plan.ConcurrentSessions != 25 {
		t.Fatalf("%+v, %v", c, err)
	}
	if _, err := Authenticate(ctx, r, secret.Plaintext(1<<60)); err != nil {
		t.Errorf("the same secret with another index: %v", err)
	}
	for name, presented := range map[string]string{
		"none": "", "no key": "hello", "unknown": token.NewAPIKey().Plaintext(1), "upper case": strings.ToUpper(text), "space": text + " ",
	} {
		if _, err := Authenticate(ctx, r, presented); !apierr.Is(err, apierr.Unauthorized) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := r.CreateSession(ctx, session.Session{ID: "s", ProjectID: "p", Status: session.Running, Kind: session.Both}, ""); err != nil {
		t.Fatal(err)
	}
	got, err := json.Marshal(Describe(r.View(), c, time.Now()))
	want := `{"project":{"id":"p","name":"Pea","plan":"Hobby","limits":{"concurrentSessions":25,"maxTimeoutSeconds":7200,"proxyGbPerMonth":5}},"usage":{"runningSessions":1,"proxyGb":0}}`
	if err != nil || string(got) != want {
		t.Errorf("me\n%s, want\n%s", got, want)
	}
	if _, err := r.RevokeKey(ctx, key.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := Authenticate(ctx, r, text); !apierr.Is(err, apierr.Unauthorized) {
		t.Errorf("a revoked key: %v", err)
	}
}

func TestWithoutTheRecordNobodyIsCalledUnknown(t *testing.T) {
	r := record(t)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := Authenticate(context.Background(), r, token.NewAPIKey().Plaintext(1))
	if !apierr.Is(err, apierr.Unavailable) {
		t.Errorf("a key this gateway cannot know of: %v", err)
	}
}

func TestPlansOfTheSpec(t *testing.T) {
	for i, want := range []struct {
		name                string
		sessions, maxTimout int
		proxyGB             float64 // -1: no cap
	}{{"Free", 3, 900, 0}, {"Hobby", 25, 7200, 5}, {"Startup", 100, 21600, 50}, {"Scale", 250, 86400, -1}} {
		p := DefaultPlans()[i]
		gb := -1.0
		if p.ProxyGBPerMonth != nil {
			gb = *p.ProxyGBPerMonth
		}
		if p.Name != want.name || p.ConcurrentSessions != want.sessions || p.MaxTimeoutSeconds != want.maxTimout || gb != want.proxyGB {
			t.Errorf("%+v, want %+v", p, want)
		}
	}
}

func TestCheckTimeout(t *testing.T) {
	free := DefaultPlans()[0]
	for timeout, want := range map[int]apierr.Code{-1: apierr.InvalidRequest, 59: apierr.InvalidRequest, 60: "", 900: "", 901: apierr.PlanLimit} {
		err := CheckTimeout(free, timeout)
		if (err != nil) != (want != "") || err != nil && !apierr.Is(err, want) {
			t.Errorf("%d: %v, want %s", timeout, err, want)
		}
		if err != nil && !strings.Contains(err.Error(), "timeout: ") {
			t.Errorf("%v does not name the field", err)
		}
	}
	if err := CheckTimeout(free, 901); apierr.From(err).Status() != 403 || !strings.Contains(err.Error(), "900") {
		t.Errorf("%v: want 403 and the maximum", err)
	}
}

func TestPricing(t *testing.T) {
	got, err := json.Marshal(DefaultPrices())
	want := `{"currency":"USD","browserHour":0.045,"vcpuHour":0.045,"gibHour":0.013,"residentialPerGb":null,"datacenterPerGb":null,"customPerGb":0}`
	if err != nil || string(got) != want {
		t.Errorf("pricing\n%s, want\n%s", got, want)
	}
}

// A gateway that starts with another tariff brings its plans into the record:
// keys of projects that have them meet the new limits.
func TestAChangedTariffTakesEffect(t *testing.T) {
	ctx := context.Background()
	r := record(t) // with the plans as shipped
	secret := token.NewAPIKey()
	if _, err := r.PutKey(ctx, placement.Project{ID: "p", Plan: "Hobby"}, placement.Key{Hash: secret.Hash()}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "tariff.json")
	if err := os.WriteFile(path, []byte(`{"plans": [{"name": "Hobby", "concurrentSessions": 26, "maxTimeoutSeconds": 60, "proxyGbPerMonth": 7.5}, {"name": "Own", "concurrentSessions": 1, "maxTimeoutSeconds": 60}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	tariff, err := LoadTariff(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.SetPlans(ctx, tariff.Plans); err != nil {
		t.Fatal(err)
	}
	c, err := Authenticate(ctx, r, secret.Plaintext(0))
	if err != nil || c.Plan.ConcurrentSessions != 26 || c.Plan.MaxTimeoutSeconds != 60 || *c.Plan.ProxyGBPerMonth != 7.5 {
		t.Errorf("%+v, %v", c.Plan, err)
	}
	if plans := r.View().Plans(); len(plans) != 5 {
		t.Errorf("plans: %+v", plans)
	}
}

func TestLoadTariff(t *testing.T) {
	load := func(text string) (Tariff, error) {
		path := filepath.Join(t.TempDir(), "tariff.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return LoadTariff(path)
	}
	got, err := load(`{"prices": {"browserHour": 0.1, "residentialPerGb": 4.5}}`)
	if err != nil || got.Prices.Browser.String() != "0.1" || got.Prices.VCPU.String() != "0.045" || got.Prices.ResidentialPerGB.String() != "4.5" ||
		len(got.Plans) != 4 {
		t.Errorf("%+v, %v", got, err)
	}
	got, err = load(`{"plans": [{"name": "Own", "concurrentSessions": 7, "maxTimeoutSeconds": 600}]}`)
	if err != nil || len(got.Plans) != 1 || got.Plans[0].ProxyGBPerMonth != nil || got.Plans[0].ConcurrentSessions != 7 {
		t.Errorf("a plan of one's own: %+v, %v", got.Plans, err)
	}
	for _, bad := range []string{`{`, `{"price": {}}`, `{"prices": {"browserHour": -1}}`, `{"sizes": {}}`, `{"plans": []}`, `{"prices": {"browserHour": "1"}}`,
		`{"prices": {"residentialPerGb": -0.1}}`, `{"prices": {"currency": "EUR"}}`, `{"plans": [{"name": "A", "proxyGbPerMonth": -1}]}`} {
		if _, err := load(bad); err == nil {
			t.Errorf("%s was taken", bad)
		}
	}
	if got, err := LoadTariff(""); err != nil || len(got.Plans) != 4 {
		t.Errorf("no file: %v", err)
	}
	if _, err := LoadTariff("/nonexistent"); err == nil {
		t.Error("a missing file was taken")
	}
}
