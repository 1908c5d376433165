package shell

import (
	"context"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/agent/procfs"
)

// grace is how long a stopped command gets to hand its shell back before bash
// itself is killed: the trap and the kills take a millisecond or two.
const grace = 500 * time.Millisecond

// abort stops command id and everything it started. The signal first: its trap
// is then pending when bash loses its child, and bash starts nothing more. A
// bash that does not report within grace hangs itself and is killed.
func (b *bash) abort(s *Shells, t target, id uint64) {
	if b.awaitStart(id) {
		killUntilGone(t, time.Now().Add(grace))
		return
	}
	deadline := time.Now().Add(grace)
	_ = b.cmd.Process.Signal(syscall.Signal(abortSignal))
	// Once more, should bash have been reading the report's line just then.
	s.tails.Go(func() { _, _ = b.feed.WriteString("\n" + b.reportLine(id)) })
	for time.Now().Before(deadline) {
		killUntilGone(t, deadline)
		ctx, cancel := context.WithTimeout(context.Background(), grace/20)
		_, ended := b.await(ctx, id)
		cancel()
		if ended {
			killUntilGone(t, deadline) // what bash had started between scan and trap
			return
		}
	}
	b.end()
}

// startGrace is how long bash gets to come to the command at all; it needs it
// only on a machine that is overloaded.
const startGrace = 3 * time.Second

// awaitStart waits until bash has come to the command: a signal before that
// would be spent on the lines that prepare it. It says whether the command is
// over, by itself or because bash never came to it and was killed.
//
// Only while bash runs a command is its descriptor 0 not the feed's pipe.
func (b *bash) awaitStart(id uint64) (over bool) {
	pid := b.cmd.Process.Pid
	for deadline := time.Now().Add(startGrace); time.Now().Before(deadline); {
		var to string
		procfs.AsOwner(pid, func() { to, _ = os.Readlink(procfs.Path(pid, "fd/0")) })
		if !strings.HasPrefix(to, "pipe:") {
			return false
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		_, over = b.await(ctx, id)
		cancel()
		if over {
			return true
		}
	}
	b.end()
	return true
}
