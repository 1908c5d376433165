package snapshot

import (
	"errors"
	"fmt"
)

// ErrNotFound says that a snapshot is neither here nor in the blob store.
var ErrNotFound = errors.New("no such snapshot")

// ErrExists says that a snapshot of that id was written before.
var ErrExists = errors.New("snapshot exists")

// Reason is why a snapshot is refused.
type Reason string

// The reasons.
const (
	Damaged   Reason = "damaged"   // altered, or sealed with another key
	Truncated Reason = "truncated" // shorter or longer than it was written
	Version   Reason = "version"   // of a format that this hostd does not read
	Foreign   Reason = "foreign"   // another snapshot's or another session's
	Missing   Reason = "missing"   // a part of it is not here
)

// Refused is the error for a snapshot that must not be resumed.
type Refused struct {
	Reason Reason
	Detail string // a sentence part for logs
}

func (e *Refused) Error() string { return fmt.Sprintf("snapshot refused (%s): %s", e.Reason, e.Detail) }

func refuse(why Reason, format string, args ...any) error {
	return &Refused{why, fmt.Sprintf(format, args...)}
}
