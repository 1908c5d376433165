package e2e

import (
	"net/http"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/cdpclient"
)

// No close that the platform makes starts the five-second clock, neither the
// gateway's (rotated URLs) nor the agent's (a Chrome that died).
func TestSpecPlatformClosesStartNoClock(t *testing.T) {
	t.Parallel()
	c := stack.Start(t).Client(t, "Scale")
	rotated, crashed := c.Create(nil), c.Create(nil)
	ctx := within(t, time.Minute)
	wait := func(s api.Session, code int, cut func(*cdpclient.Client)) {
		t.Helper()
		cdp, err := cdpclient.Dial(ctx, *s.ConnectUrl)
		if err != nil {
			t.Fatal(err)
		}
		cut(cdp)
		select {
		case <-cdp.Done():
		case <-time.After(10 * time.Second):
			t.Fatalf("nothing closed the client that wants %d", code)
		}
		if got := cdp.CloseStatus(); got != code {
			t.Errorf("closed with %d (%v), want %d", got, cdp.Err(), code)
		}
	}
	wait(rotated, 1008, func(*cdpclient.Client) {
		c.Want(http.StatusOK, http.MethodPost, sessionsPath+"/"+rotated.Id+"/rotate-urls", testenv.Fields{"disconnect": true}, nil)
	})
	wait(crashed, 1012, func(cdp *cdpclient.Client) {
		_ = cdp.Call(ctx, "", "Browser.crash", nil, nil) // the connection goes with it
	})
	time.Sleep(8 * time.Second) // longer than the rule
	for _, s := range []api.Session{rotated, crashed} {
		if got := c.Get(s.Id); got.Status != "RUNNING" {
			t.Errorf("eight seconds after its client was cut the session is %s, %v", got.Status, *got.EndReason)
		}
	}
	back, err := cdpclient.Dial(ctx, *crashed.ConnectUrl)
	if err != nil {
		t.Fatal(err)
	}
	if err := back.Call(ctx, "", "Browser.getVersion", nil, nil); err != nil {
		t.Error(err)
	}
	back.Close()
	testenv.Wait(t, 10*time.Second, "disconnected", func() bool {
		s := c.Get(crashed.Id)
		return s.EndReason != nil && *s.EndReason == "disconnected"
	})
}
