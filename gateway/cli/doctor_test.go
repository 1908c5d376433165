package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// host is a root folder of a healthy host; a test then breaks one thing.
func host(t *testing.T) examiner {
	t.Helper()
	x := examiner{root: t.TempDir(), look: func(name string) (string, error) { return "/usr/bin/" + name, nil }}
	for path, text := range map[string]string{
		"proc/cpuinfo": "flags\t\t: fpu vmx sse\n", "dev/kvm": "", "dev/net/tun": "", "sys/kernel/mm/ksm/run": "0\n",
		"proc/swaps": "Filename Type Size\n", "sys/devices/system/cpu/smt/active": "0\n", "proc/sys/vm/max_map_count": "262144\n",
		"proc/sys/user/max_user_namespaces": "95000\n", "proc/filesystems": "nodev\toverlay\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
	} {
		put(t, x, path, text)
	}
	return x
}

func put(t *testing.T, x examiner, path, text string) {
	t.Helper()
	full := filepath.Join(x.root, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestDoctorFindsWhatIsWrong(t *testing.T) {
	for _, f := range host(t).examine() {
		if f.Result != resultOK && f.Name != "open files" { // that one is this process's own
			t.Errorf("a healthy host: %+v", f)
		}
	}
	for name, c := range map[string]struct {
		spoil  func(x *examiner)
		result string
	}{
		"virtualisation (KVM)":    {func(x *examiner) { put(t, *x, "proc/cpuinfo", "flags : fpu svmx\n") }, resultWeak},
		"same-page merging (KSM)": {func(x *examiner) { put(t, *x, "sys/kernel/mm/ksm/run", "1\n") }, resultBad},
		"swap":                    {func(x *examiner) { put(t, *x, "proc/swaps", "Filename Type\n/dev/sda2 partition\n") }, resultWeak},
		"hyper-threading (SMT)":   {func(x *examiner) { put(t, *x, "sys/devices/system/cpu/smt/active", "1\n") }, resultWeak},
		"vm.max_map_count":        {func(x *examiner) { put(t, *x, "proc/sys/vm/max_map_count", "1000\n") }, resultWeak},
		"user namespaces":         {func(x *examiner) { put(t, *x, "proc/sys/user/max_user_namespaces", "0\n") }, resultBad},
		"overlay file system":     {func(x *examiner) { put(t, *x, "proc/filesystems", "ext4\n") }, resultBad},
		"/dev/net/tun":            {func(x *examiner) { _ = os.Remove(filepath.Join(x.root, "dev/net/tun")) }, resultWeak},
		"control groups":          {func(x *examiner) { put(t, *x, "sys/fs/cgroup/cgroup.controllers", "cpu\n") }, resultBad},
		"runc":                    {func(x *examiner) { x.look = func(string) (string, error) { return "", errors.New("no") } }, resultWeak},
	} {
		x := host(t)
		c.spoil(&x)
		found := false
		for _, f := range x.examine() {
			if f.Name != name {
				continue
			}
			found = true
			if f.Result != c.result || f.Mend == "" {
				t.Errorf("%s: %+v, want %s and what to do", name, f, c.result)
			}
		}
		if !found {
			t.Errorf("%s is not examined", name)
		}
	}
}

func TestDoctorPrintsForPeople(t *testing.T) {
	var b strings.Builder
	was := out
	out = &b
	defer func() { out = was }()
	if err := printFindings([]finding{{"swap", resultWeak, "on /dev/sda2", "swapoff -a"}}); err != nil {
		t.Fatal(err)
	}
	if got := b.String(); !strings.Contains(got, "weak") || !strings.Contains(got, "→ swapoff -a") {
		t.Errorf("%q", got)
	}
}
