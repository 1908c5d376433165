package microvm

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/berth-dev/berth/hostd/machine"
)

func layerOf(name string, data []byte) machine.Layer {
	return machine.Layer{Name: name, Size: int64(len(data)), Open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }}
}

// Layers that came ahead are there as long as somebody has brought them, and a
// machine that took them keeps them.
func TestLayersAhead(t *testing.T) {
	home, own := t.TempDir(), t.TempDir()
	d := &Driver{ahead: newAhead(home)}
	a, b := newLayerName(), newLayerName()
	data := append(make([]byte, 3*blockSize), "end"...)
	first, err := d.AddLayers(t.Context(), []machine.Layer{layerOf(a, data)})
	if err != nil {
		t.Fatal(err)
	}
	both, err := d.AddLayers(t.Context(), []machine.Layer{layerOf(a, data), layerOf(b, nil)})
	if err := errors.Join(err, first(), d.ahead.sweep()); err != nil { // a sweep beside a move takes nothing
		t.Fatal(err)
	}
	if d.ahead.give(layerOf(a, data[1:]), own) || d.ahead.give(layerOf(newLayerName(), data), own) {
		t.Error("a layer that nobody brought was given")
	}
	if !d.ahead.give(layerOf(a, data), own) || !d.ahead.give(layerOf(b, nil), own) {
		t.Error("a layer that came ahead was not given")
	}
	if err := both(); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(own, layerFile(a))); err != nil || !bytes.Equal(got, data) {
		t.Errorf("the machine has %d bytes of %d, %v", len(got), len(data), err)
	}
	wantEmpty(t, d.ahead.dir)
}

// What fails leaves nothing, and what a crash left goes with the next sweep.
func TestLayersAheadThatFail(t *testing.T) {
	d := &Driver{ahead: newAhead(t.TempDir())}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	good, name := layerOf(newLayerName(), []byte("good")), newLayerName()
	for what, bad := range map[string]machine.Layer{
		"name":  layerOf("../x", nil),
		"short": {Name: name, Size: 9, Open: layerOf(name, []byte("short")).Open},
		"lost":  {Name: name, Open: func() (io.ReadCloser, error) { return nil, os.ErrClosed }},
	} {
		if _, err := d.AddLayers(t.Context(), []machine.Layer{good, bad}); err == nil {
			t.Errorf("%s: taken", what)
		}
		wantEmpty(t, d.ahead.dir)
	}
	if _, err := d.AddLayers(ended, []machine.Layer{good}); !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of the call: %v", err)
	}
	wantEmpty(t, d.ahead.dir)
	if _, err := d.AddLayers(t.Context(), []machine.Layer{good}); err != nil { // and this hostd dies
		t.Fatal(err)
	}
	if err := newAhead(filepath.Dir(d.ahead.dir)).sweep(); err != nil {
		t.Fatal(err)
	}
	wantEmpty(t, d.ahead.dir)
}

func wantEmpty(t *testing.T, dir string) {
	t.Helper()
	if left, err := os.ReadDir(dir); len(left) > 0 || err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v, %v", left, err)
	}
}
