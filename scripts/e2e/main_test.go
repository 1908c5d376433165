// Package e2e tries the whole product from outside: a real gateway, hostd and
// proxyd, real machines, a real Chromium and a real bash, and what happens
// when parts of it are killed, filled up or left.
package e2e

import (
	"context"
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
)

// stack is shared by all tests that break nothing.
var stack = testenv.New(testenv.Options{Pool: "browser=1,shell=2,both=1"})

func TestMain(m *testing.M) { os.Exit(stack.Main(m)) }

// within is a context for one test's step.
func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func decode(t testing.TB, b []byte, into any) {
	t.Helper()
	if err := json.Unmarshal(b, into); err != nil {
		t.Fatalf("%v: %.500s", err, b)
	}
}
