package link

import (
	"errors"
	"fmt"
	"syscall"
)

// Errors of Read, Write and Dial that callers tell apart with errors.Is. All
// of them end the stream.
var (
	// ErrUnknownStream: the machine does not know the stream (any more): it
	// ended, expired, or the agent is another one.
	ErrUnknownStream = errors.New("link: unknown stream")
	// ErrLineage: the machine's memory is not the continuation of the memory
	// that the stream was opened with.
	ErrLineage = errors.New("link: another lineage of the machine's memory")
	// ErrSecret: the stream exists, the secret is another.
	ErrSecret = errors.New("link: wrong stream secret")
	// ErrBusy: the agent has too many streams that nobody accepted.
	ErrBusy = errors.New("link: agent accepts no more streams")
	// ErrReset: the other side called Abort, or broke the protocol.
	ErrReset = fmt.Errorf("link: stream reset: %w", syscall.ECONNRESET)
	// ErrPeerClosed: a write to a stream that the other side has closed.
	ErrPeerClosed = fmt.Errorf("link: closed by the other side: %w", syscall.EPIPE)
	// ErrWriteClosed: a write after CloseWrite.
	ErrWriteClosed = fmt.Errorf("link: write after CloseWrite: %w", syscall.EPIPE)
	// ErrExpired: the stream was broken for longer than Options.Keep. It is a
	// net.Error with Timeout() true.
	ErrExpired error = expired{}
)

var (
	errProtocol = errors.New("link: protocol error")
	errStale    = errors.New("link: an older transport came late")
	errDead     = errors.New("link: no sign of life from the other side")
)

type expired struct{}

func (expired) Error() string   { return "link: broken for too long" }
func (expired) Timeout() bool   { return true }
func (expired) Temporary() bool { return false }

// permanent says whether dialling again can help no more.
func permanent(err error) bool {
	for _, e := range []error{ErrUnknownStream, ErrLineage, ErrSecret, errProtocol} {
		if errors.Is(err, e) {
			return true
		}
	}
	var p interface{ Permanent() bool }
	return errors.As(err, &p) && p.Permanent()
}

// Refusal codes in a welcome frame; 0 accepts.
var refusals = map[byte]error{
	1: ErrUnknownStream,
	2: ErrLineage,
	3: ErrSecret,
	4: ErrBusy,
	5: errStale,
	6: errProtocol,
}

func refusalCode(err error) byte {
	for code, e := range refusals {
		if errors.Is(err, e) {
			return code
		}
	}
	return 6
}

func refusalError(code byte) error {
	if e, ok := refusals[code]; ok {
		return e
	}
	return errProtocol
}
