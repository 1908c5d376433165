package oci

import (
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// inOwnMounts runs f on a thread with a mount namespace and a working
// directory of its own. What f mounts nobody else sees; it is gone when the
// last process f has started in there, and the thread, have ended. Nothing can
// leak from there, not even when hostd is killed in the middle.
func inOwnMounts(f func() error) error {
	done := make(chan error, 1)
	go func() {
		// Never unlocked: the runtime ends the thread with the goroutine
		// instead of reusing it.
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			// The main thread cannot end. Hold it, so that the next goroutine
			// gets another, and give it back untouched.
			done <- inOwnMounts(f)
			runtime.UnlockOSThread()
			return
		}
		done <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
				return fmt.Errorf("unshare mounts: %w", err)
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return fmt.Errorf("make mounts private: %w", err)
			}
			return f()
		}()
	}()
	return <-done
}
