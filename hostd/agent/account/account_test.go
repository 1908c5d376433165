package account

import (
	"errors"
	"os"
	"slices"
	"testing"
)

func TestCredential(t *testing.T) {
	guest := Guest()
	if c := guest.Credential(); os.Geteuid() == 0 && (c == nil || c.Uid != 1000 || c.Gid != 1000) || os.Geteuid() != 0 && c != nil {
		t.Errorf("guest's credential: %+v", c)
	}
	if c := Current().Credential(); os.Geteuid() == 0 && c != nil {
		t.Errorf("root needs no credential to stay root: %+v", c)
	}
}

func TestOwns(t *testing.T) {
	var got []int
	failed := errors.New("failed")
	err := Guest().Owns(func(uid, gid int) error { got = []int{uid, gid}; return failed })
	if os.Geteuid() == 0 && (err != failed || !slices.Equal(got, []int{1000, 1000})) {
		t.Errorf("guest: %v, %v", got, err)
	}
	if err := Current().Owns(func(int, int) error { return failed }); err != nil {
		t.Errorf("a file made by oneself needs no chown: %v", err)
	}
}

func TestEnv(t *testing.T) {
	env := Guest().Env("dumb")
	for _, want := range []string{"HOME=/home/user", "USER=user", "LANG=C.UTF-8", "TERM=dumb"} {
		if !slices.Contains(env, want) {
			t.Errorf("%v lacks %s", env, want)
		}
	}
}
