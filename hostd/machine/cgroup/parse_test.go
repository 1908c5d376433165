package cgroup

import (
	"strings"
	"testing"
)

func TestParseMount(t *testing.T) {
	for line, want := range map[string][3]string{
		"35 31 0:29 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory":                {"/sys/fs/cgroup/memory", "cgroup", "rw,memory"},
		"41 31 0:31 / /sys/fs/cgroup rw,nosuid shared:9 master:1 - cgroup2 cgroup2 rw,nsdelegate": {"/sys/fs/cgroup", "cgroup2", "rw,nsdelegate"},
	} {
		point, kind, options, ok := parseMount(line)
		if got := [3]string{point, kind, options}; !ok || got != want {
			t.Errorf("%s: got %v, %v", line, got, ok)
		}
	}
	for _, bad := range []string{"", " - ", "1 2 3 - cgroup", "35 31 0:29 / /x rw cgroup cgroup rw"} {
		if _, _, _, ok := parseMount(bad); ok {
			t.Errorf("took %q", bad)
		}
	}
}

func TestInGroup(t *testing.T) {
	const text = "9:name=systemd:/\n4:memory:/berth/aa/12\n0::/berth/aa/1234\n"
	for group, want := range map[string]bool{
		"/berth/aa/12": true, "/berth/aa/1234": true, "/berth/aa": true,
		"/berth/aa/1": false, "/berth/a": false, "/berth/aa/123": false, "memory": false,
	} {
		if got := inGroup(text, group); got != want {
			t.Errorf("%s: %v", group, got)
		}
	}
	if !inGroup("3:cpu:/we:ird/x\n", "/we:ird") {
		t.Error("a colon in a path was taken for a separator")
	}
}

func FuzzCgroupText(f *testing.F) {
	f.Add("0::/berth/aa/12", "/berth/aa/12")
	f.Fuzz(func(t *testing.T, text, group string) {
		if inGroup(text, group) && !strings.Contains(text, group) {
			t.Errorf("%q found in %q", group, text)
		}
		parseMount(text)
	})
}
