package gossip

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// A life is one start of a member. memberlist keeps a name for the address
// that had it until it is sure that one is dead, so a daemon restarted on
// another port would stay out for seconds. Each start therefore joins under a
// name of its own, "name/start/random", and of several lives of one name the
// latest start counts.
type life struct {
	name  string
	start int64 // Unix milliseconds
	id    string
}

func newLife(name string, now time.Time) (life, error) {
	if name == "" || strings.ContainsAny(name, "/ \n\t") || len(name) > 100 {
		return life{}, fmt.Errorf("gossip: %q is no member name: want 1 to 100 characters without space or slash", name)
	}
	var id [4]byte
	_, _ = rand.Read(id[:]) // never fails since Go 1.24
	return life{name, now.UnixMilli(), hex.EncodeToString(id[:])}, nil
}

func (l life) String() string {
	return l.name + "/" + strconv.FormatInt(l.start, 36) + "/" + l.id
}

func parseLife(s string) (life, bool) {
	parts := strings.Split(s, "/")
	if len(parts) != 3 || parts[0] == "" {
		return life{}, false
	}
	start, err := strconv.ParseInt(parts[1], 36, 64)
	return life{parts[0], start, parts[2]}, err == nil
}

// after orders two lives of one name; the random part decides between starts
// of one millisecond, the same way everywhere.
func (l life) after(o life) bool {
	return l.start > o.start || l.start == o.start && l.id > o.id
}
