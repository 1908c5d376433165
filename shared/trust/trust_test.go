package trust

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestDaemonsThatStartAtOnceAgree(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "secret")
	proofs := make([]string, 8)
	var all sync.WaitGroup
	for i := range proofs {
		all.Go(func() {
			s, err := LoadOrCreate(path)
			if err != nil {
				t.Error(err)
				return
			}
			proofs[i] = s.Proof()
		})
	}
	all.Wait()
	for _, p := range proofs {
		if p != proofs[0] || p == "" {
			t.Fatalf("%q", proofs)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".secret-*")); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

func TestBadSecretFiles(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		mode os.FileMode
		want string
	}{
		"empty":   {"", 0o600, "32 hex digits"},
		"short":   {strings.Repeat("a", 30), 0o600, "32 hex digits"},
		"no hex":  {strings.Repeat("x", 64), 0o600, "32 hex digits"},
		"for all": {strings.Repeat("a", 64), 0o644, "chmod 600"},
	} {
		path := filepath.Join(t.TempDir(), "secret")
		if err := os.WriteFile(path, []byte(c.text), c.mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, c.mode); err != nil {
			t.Fatal(err)
		}
		_, err := LoadOrCreate(path)
		if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), strings.Repeat("a", 30))) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestProofsAndKeys(t *testing.T) {
	a, b := New(), New()
	if !a.Check(a.Proof()) || a.Check(b.Proof()) || a.Check("") {
		t.Error("Check believes what it should not, or the reverse")
	}
	if len(a.Key("gossip")) != 32 || bytes.Equal(a.Key("gossip"), a.Key("proof")) {
		t.Error("keys of two purposes are alike")
	}
}

func TestLoopbackOnly(t *testing.T) {
	for addr, ok := range map[string]bool{
		"127.0.0.1:1": true, "127.8.9.1:1": true, "[::1]:1": true, "localhost:1": true,
		":1": false, "0.0.0.0:1": false, "[::]:1": false, "10.0.0.1:1": false, "example.com:1": false,
		"127.0.0.1": false, "": false, "127.0.0.1.example.com:1": false,
	} {
		err := LoopbackOnly("--listen", addr)
		if (err == nil) != ok || err != nil && !strings.HasPrefix(err.Error(), "--listen: ") {
			t.Errorf("%q: %v", addr, err)
		}
	}
}
