package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/session"
)

func TestParsePool(t *testing.T) {
	got, err := parsePool("--pool", " browser=4, shell=0,,both=2 ")
	if err != nil || got[session.Browser] != 4 || got[session.Shell] != 0 || got[session.Both] != 2 {
		t.Errorf("%v %v", got, err)
	}
	for _, bad := range []string{"browser", "browser=", "browser=-1", "car=1", "browser=1.5", "=1"} {
		if _, err := parsePool("--pool", bad); err == nil || !strings.HasPrefix(err.Error(), "--pool: ") || !strings.Contains(err.Error(), "KIND=N") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestMachinesForMemory(t *testing.T) {
	for text, want := range map[string]int{
		"MemFree: 1 kB\nMemTotal:       16384000 kB\n": 100, "MemTotal: 1 kB\n": 4,
		"": -1, "MemTotal: many kB\n": -1, "MemTotal:\n": -1,
	} {
		name := filepath.Join(t.TempDir(), "meminfo")
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		n, err := machinesFor(name)
		if want < 0 != (err != nil) || err == nil && n != want {
			t.Errorf("%q: %d, %v", text, n, err)
		}
	}
}

func TestNumbersThatStartNothingAreRefused(t *testing.T) {
	good := func() serveCmd {
		return serveCmd{Name: "h", PoolParallel: 1, MaxMachines: 4, DiskGiB: 1, Pids: 100, BootDeadline: time.Minute}
	}
	c := good()
	if err := c.complete(); err != nil || !filepath.IsAbs(c.Home) {
		t.Errorf("%q %v", c.Home, err)
	}
	for flag, change := range map[string]func(*serveCmd){
		"--pool-parallel": func(c *serveCmd) { c.PoolParallel = -1 },
		"--max-machines":  func(c *serveCmd) { c.MaxMachines = -1 },
		"--disk-gib":      func(c *serveCmd) { c.DiskGiB = 0 },
		"--pids":          func(c *serveCmd) { c.Pids = 0 },
		"--boot-deadline": func(c *serveCmd) { c.BootDeadline = 0 },
		"--pool-pace":     func(c *serveCmd) { c.PoolPace = -1 },
	} {
		c := good()
		change(&c)
		if err := c.complete(); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s: %v", flag, err)
		}
	}
}
