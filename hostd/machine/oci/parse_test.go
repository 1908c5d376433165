package oci

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

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
