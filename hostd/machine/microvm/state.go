package microvm

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
)

const stateName = "state.json"

// state is what the next hostd must know of a running machine. It is written
// whole, by renaming, when the machine has started and before anything in it
// becomes untrue. Nothing is synced: no machine outlives its host.
type state struct {
	Pid      int      `json:"pid"`
	Template string   `json:"template"` // content hash
	Layers   []string `json:"layers"`   // of the disk, lowest first; the last one is written
	// Frozen is what the machine ought to be: a hostd that adopts it makes it so.
	Frozen bool `json:"frozen"`
	// Captured: the topmost layer is in somebody's capture. It must not be
	// written again under its name.
	Captured bool `json:"captured"`
	// Merging is how many of the layers stay below while those above become
	// one; nil when none do.
	Merging *int `json:"merging,omitempty"`
}

func readState(dir string) (s state, err error) {
	data, err := os.ReadFile(filepath.Join(dir, stateName))
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("%s: %w", stateName, err)
	}
	if len(s.Layers) == 0 {
		return s, errors.New(stateName + ": no disk layer")
	}
	for _, name := range s.Layers {
		if !validLayer.MatchString(name) {
			return s, fmt.Errorf("%s: layer %q", stateName, name)
		}
	}
	return s, nil
}

func (s state) write(dir string) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	half := filepath.Join(dir, stateName+".tmp")
	if err := os.WriteFile(half, data, 0o600); err != nil {
		return err
	}
	return os.Rename(half, filepath.Join(dir, stateName))
}

// validLayer is a name that newLayerName makes: QEMU's node names have at most
// 31 characters and begin with a letter.
var validLayer = regexp.MustCompile(`^l[0-9a-f]{30}$`)

// newLayerName gives a name that nobody ever had.
func newLayerName() string {
	b := make([]byte, 15)
	_, _ = rand.Read(b) // never fails since Go 1.24
	return "l" + hex.EncodeToString(b)
}

func newID() string {
	b := make([]byte, 8)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}
