package oci

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
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

func TestNewEnough(t *testing.T) {
	for out, want := range map[string]bool{
		"runc version 1.1.5+ds1\ncommit: 1": true, "runc version 1.0.3": false, "runc version 1.4.0": true,
		"runc version 2.0.0-rc1": true, "crun version 1.8.1": false, "": false, "runc version 0.9": false,
	} {
		if got := newEnough(out); got != want {
			t.Errorf("%q: %v", out, got)
		}
	}
}

func TestValidID(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.String().Draw(t, "id")
		if validID.MatchString(id) && (strings.ContainsAny(id, "/.- \n") || id == "" || len(id) > 64) {
			t.Fatalf("took %q", id)
		}
	})
	if !validID.MatchString("00ffaa") {
		t.Error("refused a good id")
	}
}

func TestRootPointHidesNothing(t *testing.T) {
	point, err := rootPoint("/mnt/data/berth", "/srv")
	if err != nil || point == "/mnt" || point == "/srv" {
		t.Errorf("picked %q (%v)", point, err)
	}
	if point, err := rootPoint("/mnt/x", "/media/x", "/srv/x", "/opt/x"); err == nil {
		t.Errorf("picked %q, which hides what is needed", point)
	}
}
