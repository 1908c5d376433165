package files

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// TestSwappedFolder: a program that swaps a folder for a link out of the
// workspace, again and again, never makes root read, write or delete there.
func TestSwappedFolder(t *testing.T) {
	s := serve(t)
	outside := filepath.Join(filepath.Dir(s.dir), "outside")
	secret := filepath.Join(outside, "f")
	if err := os.Mkdir(outside, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(secret, []byte("secret"), 0o644); err != nil {
		t.Fatal(err)
	}
	s.write("real/f", "own")
	swap, real := filepath.Join(s.dir, "swap"), filepath.Join(s.dir, "real")
	stop := make(chan struct{})
	var swapper sync.WaitGroup
	swapper.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			_ = os.Rename(real, swap)
			_ = os.Rename(swap, real)
			_ = os.Symlink(outside, swap)
			_ = os.Remove(swap)
		}
	})
	for range 400 {
		if w := s.file("GET", "swap/f", "", nil); strings.Contains(w.Body.String(), "secret") {
			t.Fatal("read outside")
		}
		s.file("GET", "swap", "&list=1", nil)
		s.file("PUT", "swap/f", "", strings.NewReader("own"))
		s.file("PUT", "swap/new/deep", "", strings.NewReader("own"))
		s.do("POST", "/files/move", strings.NewReader(`{"from":"swap/f","to":"swap/g"}`))
		s.file("DELETE", "swap/f", "", nil)
	}
	close(stop)
	swapper.Wait()
	names, _ := os.ReadDir(outside)
	if b, err := os.ReadFile(secret); err != nil || string(b) != "secret" || len(names) != 1 {
		t.Errorf("outside: %q, %v, %v", b, err, names)
	}
}
