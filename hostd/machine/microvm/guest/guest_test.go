package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/agentlink"
)

func TestParseArgs(t *testing.T) {
	for text, want := range map[string][]string{
		"":                               nil,
		"\x00":                           nil,
		"--kind\x00shell\x00":            {"--kind", "shell"},
		"--kind\x00shell":                {"--kind", "shell"},
		"--empty\x00\x00--last\x00x y\n": {"--empty", "", "--last", "x y\n"},
	} {
		if got := parseArgs([]byte(text)); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestWalkStopsAndReports(t *testing.T) {
	var done []string
	clock := time.Second
	do := func(name string, err error) step {
		return step{name, func() error { done = append(done, name); clock += 5 * time.Millisecond; return err }}
	}
	broken := errors.New("broken")
	report, err := walk([]step{do("first", nil), do("second", broken), do("third", nil)}, func() time.Duration { return clock })
	if !errors.Is(err, broken) || !strings.HasPrefix(err.Error(), "second: ") {
		t.Errorf("error %v", err)
	}
	if want := "kernel 1000 ms, first 5"; report != want {
		t.Errorf("report %q, want %q", report, want)
	}
	if want := []string{"first", "second"}; !slices.Equal(done, want) {
		t.Errorf("done %q", done)
	}
}

func TestEveryUserLeavesRoomForTheAgent(t *testing.T) {
	for _, row := range []struct{ threads, now, want uint64 }{
		{1152, 90, 998}, {200, 100, 75}, {100, 200, 0},
	} {
		if got := limits(row.threads, row.now)[unix.RLIMIT_NPROC]; got.Cur != row.want || got.Max != row.want {
			t.Errorf("%d threads, %d of them now: %+v, want %d", row.threads, row.now, got, row.want)
		}
	}
	if l := limits(1000, 100)[syscall.RLIMIT_CORE]; l.Cur != 0 || l.Max != 0 {
		t.Errorf("core dumps: %+v", l)
	}
}

func TestMachinesDifferInTheirID(t *testing.T) {
	const name = "/etc/machine-id"
	first, second := files()[name], files()[name]
	if first == second || !regexp.MustCompile(`^[0-9a-f]{32}\n$`).MatchString(first) {
		t.Errorf("machine ids %q and %q", first, second)
	}
}

func TestAwait(t *testing.T) {
	path := filepath.Join(t.TempDir(), "vda")
	if err := await(path, 10*time.Millisecond); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("a device that never comes: %v", err)
	}
	time.AfterFunc(10*time.Millisecond, func() { _ = os.WriteFile(path, nil, 0o600) })
	if err := await(path, 10*time.Second); err != nil {
		t.Error(err)
	}
	if err := await(filepath.Join(path, "below"), time.Minute); !errors.Is(err, syscall.ENOTDIR) { // at once
		t.Errorf("a path that cannot be: %v", err)
	}
}

func TestPassKeepsADescriptorAcrossExec(t *testing.T) {
	closed := func(fd int) bool {
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if err != nil {
			t.Fatal(err)
		}
		return flags&unix.FD_CLOEXEC != 0
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	other, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 100)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(other)
	if err := pass(fd, other); err != nil || closed(other) {
		t.Errorf("to another number: %v", err)
	}
	if err := pass(fd, fd); err != nil || closed(fd) {
		t.Errorf("to the same number: %v", err)
	}
}

// needRoot skips on a developer's laptop and fails in CI.
func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("this test makes a network namespace and needs root")
	}
	t.Skip("needs root: makes a network namespace")
}

// The texts for nft and ip do what they say, in a namespace with an eth0.
func TestNetworkTexts(t *testing.T) {
	needRoot(t)
	rules, err := firewall()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for name, text := range map[string]string{"rules": rules, "links": links()} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("unshare", "--net", "sh", "-ec", `
ip tuntap add dev eth0 mode tap
nft -f rules
ip -batch links
ip -4 -o addr show dev eth0
ip neigh show dev eth0
ip route
nft list ruleset`)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for _, want := range []string{
		agentlink.GuestAddr + "/30",
		agentlink.TapAddr + " lladdr " + agentlink.TapMAC + " PERMANENT",
		"default via " + agentlink.TapAddr + " dev eth0",
		"meta skgid 900 goto browser",
	} {
		if !strings.Contains(string(out), want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

func TestTellGivesTheProgramsWords(t *testing.T) {
	err := tell("to read", "/bin/sh", "-c", "cat >&2; exit 3")
	if err == nil || !strings.Contains(err.Error(), "to read") {
		t.Errorf("error %v", err)
	}
}
