package control

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
)

func TestHoldingAnHonestAgent(t *testing.T) {
	var frozen agentlink.Freeze
	var thawed agentlink.Thaw
	var clocks int
	var read time.Time // when the clock was read last
	state := strings.Repeat("state", 100_000)
	got := make(chan int, 1)
	a := agent(t, func(w http.ResponseWriter, r *http.Request) {
		status := http.StatusNoContent
		switch r.Method + " " + r.URL.Path {
		case "POST /control/freeze":
			_ = json.NewDecoder(r.Body).Decode(&frozen)
		case "GET /control/clock":
			if clocks++; clocks < 3 {
				time.Sleep(2 * quick) // the machine is slow at first
			}
			read = time.Now()
			_ = json.NewEncoder(w).Encode(agentlink.Clock{Monotonic: int64(clocks)})
			return
		case "POST /control/thaw":
			_ = json.NewDecoder(r.Body).Decode(&thawed)
		case "POST /control/import":
			n, _ := io.Copy(io.Discard, r.Body)
			got <- int(n)
		case "GET /control/export":
			_, _ = io.WriteString(w, state)
			return
		default:
			status = http.StatusNotFound
		}
		w.WriteHeader(status)
	})
	ctx := t.Context()
	if err := a.Freeze(ctx, agentlink.Freeze{Portable: true}); err != nil || !frozen.Portable {
		t.Errorf("Freeze: %v, %+v", err, frozen)
	}
	// Where no look was quick, this computer stood still meanwhile: then once more.
	for end := time.Now().Add(time.Minute); ; clocks = 0 {
		if err := a.Thaw(ctx, agentlink.Thaw{Entropy: []byte("random"), Fresh: true}); err != nil || string(thawed.Entropy) != "random" || !thawed.Fresh {
			t.Fatalf("Thaw: %v, %+v", err, thawed)
		}
		if clocks < compares || time.Now().After(end) {
			break
		}
	}
	if off := read.Sub(thawed.Now).Abs(); off > quick || thawed.AsOf != int64(clocks) || clocks < 3 {
		t.Errorf("after %d looks at the clock Now is off by %s, as of %d", clocks, off, thawed.AsOf)
	}
	r, err := a.Export(ctx, int64(len(state)))
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r); err != nil || string(b) != state {
		t.Errorf("Export: %d bytes, %v", len(b), err)
	}
	r.Close()
	if err := a.Import(ctx, strings.NewReader(state)); err != nil || <-got != len(state) {
		t.Errorf("Import: %v", err)
	}
}

func TestHoldingAHostileAgent(t *testing.T) {
	endless := bytes.Repeat([]byte("x"), 1<<20)
	a := agent(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/control/export":
			for r.Context().Err() == nil {
				if _, err := w.Write(endless); err != nil {
					return
				}
			}
		default:
			http.Error(w, string(endless), http.StatusTeapot)
		}
	})
	r, err := a.Export(t.Context(), 5<<20)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, r); err == nil || n > 5<<20 {
		t.Errorf("%d bytes of an endless state, %v", n, err)
	}
	r.Close()
	if err := a.Import(t.Context(), strings.NewReader("s")); err == nil || len(err.Error()) > 2*maxError {
		t.Errorf("Import: an error of %d bytes", len(err.Error()))
	}
	cut := agent(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(endless)
		panic(http.ErrAbortHandler)
	})
	if r, err = cut.Export(t.Context(), 5<<20); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, r); err == nil {
		t.Error("a state that was cut looks whole")
	}
	r.Close()
	refusing := agent(t, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "not frozen", http.StatusConflict) })
	if _, err := refusing.Export(t.Context(), 1); err == nil || !strings.Contains(err.Error(), "not frozen") {
		t.Errorf("a refused export: %v", err)
	}
}
