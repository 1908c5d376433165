// Package identity makes a machine whose memory was captured know the time
// again, and one whose memory was cloned another than its siblings: clock,
// entropy, machine-id, boot id, keys.
package identity

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// precise is what the clock is left alone within: the host's word is no
	// better than half of the time that comparing the clocks took.
	precise = 5 * time.Millisecond
	// tolerable is how far a clock that may not be set may be off in silence.
	tolerable = 50 * time.Millisecond
	// MinEntropy is the least that AddEntropy takes, bytes.
	MinEntropy = 64
	maxEntropy = 4 << 10
)

// SetClock sets the wall clock to now, which was true at the moment asOf. In a
// container the clock is the host's and may not be set: a difference is logged.
func SetClock(now, asOf time.Time, log *slog.Logger) error {
	if now.IsZero() {
		return errors.New("set clock: no time")
	}
	off := now.Round(0).Sub(asOf.Round(0)) // of wall clocks, not of monotonic ones
	if off.Abs() <= precise {
		return nil
	}
	ts, err := unix.TimeToTimespec(now.Add(time.Since(asOf)))
	if err == nil {
		err = unix.ClockSettime(unix.CLOCK_REALTIME, &ts)
	}
	switch {
	case err == nil:
		log.Info("clock set", "by", off)
		return nil
	case !errors.Is(err, unix.EPERM):
		return fmt.Errorf("set clock: %w", err)
	case off.Abs() > tolerable:
		log.Warn("the clock is off and may not be set", "by", off)
	}
	return nil
}

// Monotonic is the machine's clock that nobody sets, as long as the machine lives.
func Monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail for a clock that is there
	return time.Duration(ts.Nano())
}

// AddEntropy mixes random bytes into the kernel's pool, credits them in full and
// makes the generator draw from it at once, so that nothing drawn from now on
// was drawn by a clone too. In a container the pool is the host's: nothing to do.
func AddEntropy(b []byte) error {
	if len(b) < MinEntropy || len(b) > maxEntropy {
		return fmt.Errorf("add entropy: %d bytes, must be %d to %d", len(b), MinEntropy, maxEntropy)
	}
	f, err := os.OpenFile("/dev/random", os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("add entropy: %w", err)
	}
	defer f.Close()
	info := poolInfo{bits: int32(8 * len(b)), size: int32(len(b))}
	copy(info.bytes[:], b)
	err = ioctl(f, rndAddEntropy, unsafe.Pointer(&info))
	if err == nil {
		err = ioctl(f, rndReseedCRNG, nil)
	}
	if err != nil && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) {
		return fmt.Errorf("add entropy: %w", err)
	}
	return nil
}

// random(4): struct rand_pool_info, with its buffer, and its requests.
type poolInfo struct {
	bits, size int32
	bytes      [maxEntropy]byte
}

const (
	rndAddEntropy = 0x40085203
	rndReseedCRNG = 0x5207
)

func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// New gives the machine below root ("/", but for tests) another identity:
// machine-id, boot id, ssh host keys where there are some. What the kernel does
// not let change stays. state is the agent's own folder.
func New(ctx context.Context, root, state string) error {
	id := machineID()
	for _, name := range []string{"etc/machine-id", "var/lib/dbus/machine-id"} {
		if err := renewFile(filepath.Join(root, name), id); err != nil {
			return fmt.Errorf("identity: %w", err)
		}
	}
	return errors.Join(newHostKeys(ctx, root), newBootID(root, state))
}

// machineID is 32 hexadecimal digits, a version 4 UUID, and a newline (machine-id(5)).
func machineID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return hex.EncodeToString(b[:]) + "\n"
}

// renewFile replaces a file that is there; a link is what it links to's matter.
func renewFile(path, content string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !info.Mode().IsRegular() {
		return nil
	}
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", []byte(content), 0o444); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// newHostKeys makes an ssh server's keys again, of the kinds that were there.
func newHostKeys(ctx context.Context, root string) error {
	keys, err := filepath.Glob(filepath.Join(root, "etc/ssh/ssh_host_*_key"))
	if err != nil {
		return fmt.Errorf("host keys: %w", err)
	}
	for _, key := range keys {
		kind := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(key), "ssh_host_"), "_key")
		if err := errors.Join(os.Remove(key), os.RemoveAll(key+".pub")); err != nil {
			return fmt.Errorf("host keys: %w", err)
		}
		out, err := exec.CommandContext(ctx, "ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", key).CombinedOutput()
		if err != nil {
			return fmt.Errorf("host keys: %w: %s", err, out)
		}
	}
	return nil
}

// newBootID lays a file over the kernel's boot id, which cannot be written.
func newBootID(root, state string) error {
	target := filepath.Join(root, "proc/sys/kernel/random/boot_id")
	id := strings.TrimSpace(machineID())
	text := id[:8] + "-" + id[8:12] + "-" + id[12:16] + "-" + id[16:20] + "-" + id[20:] + "\n"
	file := filepath.Join(state, "boot-id")
	if err := os.WriteFile(file, []byte(text), 0o444); err != nil {
		return fmt.Errorf("boot id: %w", err)
	}
	// A file that is laid already is the one just written.
	if now, err := os.ReadFile(target); err == nil && string(now) == text {
		return nil
	}
	err := unix.Mount(file, target, "", unix.MS_BIND, "")
	if err != nil && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("boot id: %w", err)
	}
	return nil
}
