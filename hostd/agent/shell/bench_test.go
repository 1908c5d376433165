package shell

import (
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"testing"

	"github.com/berth-dev/berth/shared/agentlink"
)

// BenchmarkTrue is the headline: `true` in a warm shell, through the handler.
func BenchmarkTrue(b *testing.B) {
	s := newShells(b)
	if err := s.Warm(b.Context()); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		w := httptest.NewRecorder()
		s.ServeHTTP(w, httptest.NewRequest("POST", agentlink.PathExec, strings.NewReader(`{"command":"true"}`)))
		if w.Code != http.StatusOK {
			b.Fatal(w.Body)
		}
	}
}

// BenchmarkFreshTrue is the same with shell false.
func BenchmarkFreshTrue(b *testing.B) {
	s := newShells(b)
	for b.Loop() {
		run(b, s, Command{Text: "true"})
	}
}

// BenchmarkBashTrue is what they are measured beside.
func BenchmarkBashTrue(b *testing.B) {
	for b.Loop() {
		if err := exec.Command("bash", "-c", "true").Run(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkOutput is how fast a command's output passes.
func BenchmarkOutput(b *testing.B) {
	s := newShells(b)
	b.SetBytes(64 << 20)
	for b.Loop() {
		run(b, s, Command{Text: "head -c 67108864 /dev/zero", Shell: Default})
	}
}
