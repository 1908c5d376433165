package microvm_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/machinetest"
	"github.com/berth-dev/berth/hostd/machine/microvm"
	"github.com/berth-dev/berth/shared/agentlink"
)

// cacheEnv names the folder of templates that all tests of a run share, those
// of a host that crashes included: a template takes seconds to make.
const cacheEnv = "MICROVM_TEST_CACHE"

func TestMain(m *testing.M) {
	if os.Getenv(cacheEnv) == "" {
		cache, err := os.MkdirTemp("", "microvm-cache-")
		if err != nil {
			panic(err)
		}
		os.Setenv(cacheEnv, cache)
		machinetest.Main(m, subject, func() error { return goleak.Find() }, func() error { return os.RemoveAll(cache) })
	}
	machinetest.Main(m, subject)
}

var subject = machinetest.Subject{BaseEnv: "BERTH_VM_FILES", OwnKernel: true, Slot: makeTap,
	New: func(t testing.TB, home, base, layer string) (machine.Driver, func()) {
		return newDriver(t, home, os.Getenv(cacheEnv), base, layer)
	},
	Sibling: func(t testing.TB, home, base, layer string) (machine.Driver, func()) {
		return newDriver(t, home, filepath.Join(home, "cache"), base, layer)
	}}

func newDriver(t testing.TB, home, cache, base, layer string) (machine.Driver, func()) {
	t.Helper()
	d, err := microvm.New(microvm.Config{Home: home, Cache: cache, Boot: base, AgentLayer: layer, Accel: microvm.TCG, Ready: ready})
	if err != nil {
		t.Fatal(err)
	}
	return d, func() {
		if err := d.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
}

// ready asks the suite's agent for an echo.
func ready(ctx context.Context, dial microvm.Dial) error {
	conn, err := dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := json.NewEncoder(conn).Encode(map[string]string{"do": "echo", "text": "up"}); err != nil {
		return err
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err == nil && !strings.Contains(line, `"up"`) {
		err = fmt.Errorf("the agent says %q", line)
	}
	return err
}

// makeTap does to a bare namespace what hostd/network does to a slot.
func makeTap(t testing.TB, netns string) {
	t.Helper()
	for _, line := range []string{
		"tuntap add " + agentlink.TapName + " mode tap vnet_hdr",
		"link set " + agentlink.TapName + " address " + agentlink.TapMAC + " up",
		"addr add " + agentlink.TapAddr + "/30 dev " + agentlink.TapName,
		"neigh replace " + agentlink.GuestAddr + " lladdr " + agentlink.GuestMAC + " dev " + agentlink.TapName,
	} {
		if out, err := exec.Command("ip", append([]string{"-n", netns}, strings.Fields(line)...)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v: %s", line, err, out)
		}
	}
}

func TestSuite(t *testing.T) { machinetest.Run(t, subject) }
