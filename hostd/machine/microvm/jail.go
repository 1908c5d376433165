package microvm

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// jailName is the name under which this program starts itself to become QEMU.
const jailName = "berth-qemu-jail"

// jail says what the process confines itself to before it becomes QEMU. Its
// parent has put it into fresh mount, pid, ipc, uts and network namespaces and
// writes this to its standard input: a parent that dies before leaves a process
// that sees the end of the file and goes.
type jail struct {
	Dir   string   `json:"dir"`   // a folder to mount the root on, in this process's namespace only
	Procs []string `json:"procs"` // files of the cgroup to enter
	UID   int      `json:"uid"`   // user and group
	File  int64    `json:"file"`  // bytes that a file may grow to
	KVM   bool     `json:"kvm"`   // /dev/kvm is there
	Path  string   `json:"path"`  // QEMU, below /usr
	Args  []string `json:"args"`  // its arguments, its name first
}

func init() {
	if len(os.Args) == 0 || os.Args[0] != jailName {
		return
	}
	var j jail
	err := json.NewDecoder(os.Stdin).Decode(&j)
	if err == nil {
		err = j.become()
	}
	fmt.Fprintln(os.Stderr, jailName+":", err)
	os.Exit(1)
}

// become enters the cgroup, leaves the host's files and rights and execs. It
// returns only with an error.
func (j jail) become() error {
	if err := enter(j.Procs); err != nil {
		return err
	}
	if err := j.root(); err != nil {
		return err
	}
	for _, step := range []func() error{
		func() error { return unix.Sethostname([]byte("berth")) },
		func() error { return limit(unix.RLIMIT_CORE, 0) },
		func() error { return limit(unix.RLIMIT_FSIZE, uint64(j.File)) },
		func() error { return unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) },
		func() error { return syscall.Setgroups(nil) },
		func() error { return syscall.Setresgid(j.UID, j.UID, j.UID) },
		func() error { return syscall.Setresuid(j.UID, j.UID, j.UID) }, // drops all capabilities
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return fmt.Errorf("exec %s: %w", j.Path, syscall.Exec(j.Path, j.Args, nil))
}

// enter moves this process into a cgroup.
func enter(procs []string) error {
	for _, path := range procs {
		// No O_CREAT: a group that the next hostd has swept meanwhile stays gone.
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		if _, err := f.WriteString("0"); err != nil {
			return fmt.Errorf("enter cgroup: %w", err)
		}
		f.Close()
	}
	return nil
}

func limit(resource int, n uint64) error {
	return unix.Setrlimit(resource, &unix.Rlimit{Cur: n, Max: n})
}

// root makes a root with QEMU's program files, a /proc of this process alone
// and two or three devices, all read-only, and leaves every other mount.
func (j jail) root() error {
	at := func(path string) string { return filepath.Join(j.Dir, path) }
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("tmpfs", j.Dir, "tmpfs", unix.MS_NOSUID|unix.MS_NOEXEC, "size=64k,mode=0755"); err != nil {
		return fmt.Errorf("mount root: %w", err)
	}
	if err := errors.Join(os.Mkdir(at("usr"), 0o755), os.Mkdir(at("proc"), 0o755), os.Mkdir(at("dev"), 0o755)); err != nil {
		return err
	}
	const locked = unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV
	if err := bind("/usr", at("usr"), locked); err != nil {
		return err
	}
	for _, name := range []string{"lib", "lib64"} { // the loader's path
		if err := j.library(name); err != nil {
			return err
		}
	}
	if err := unix.Mount("proc", at("proc"), "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "subset=pid"); err != nil {
		return fmt.Errorf("mount proc: %w", err)
	}
	for _, dev := range []string{"/dev/null", "/dev/urandom"} {
		if err := errors.Join(os.WriteFile(at(dev), nil, 0o600), bind(dev, at(dev), unix.MS_NOSUID|unix.MS_NOEXEC)); err != nil {
			return err
		}
	}
	if j.KVM {
		if err := j.device("/dev/kvm"); err != nil {
			return err
		}
	}
	if err := unix.Mount("", j.Dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY|unix.MS_NOSUID, ""); err != nil {
		return fmt.Errorf("make root read-only: %w", err)
	}
	return pivot(j.Dir)
}

// device makes a node of a device that is this machine's to open: the host's
// belongs to root and a group.
func (j jail) device(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	node := filepath.Join(j.Dir, path)
	if err := unix.Mknod(node, unix.S_IFCHR|0o600, int(st.Rdev)); err != nil {
		return fmt.Errorf("make %s: %w", path, err)
	}
	return os.Chown(node, j.UID, j.UID)
}

// library makes /lib or /lib64 as the host has it: a link into /usr, or a folder.
func (j jail) library(name string) error {
	to, err := os.Readlink("/" + name)
	if err == nil {
		return os.Symlink(to, filepath.Join(j.Dir, name))
	}
	if _, err := os.Stat("/" + name); err != nil {
		return nil // a host without it
	}
	if err := os.Mkdir(filepath.Join(j.Dir, name), 0o755); err != nil {
		return err
	}
	return bind("/"+name, filepath.Join(j.Dir, name), unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV)
}

func bind(from, to string, flags uintptr) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", from, err)
	}
	if err := unix.Mount("", to, "", unix.MS_REMOUNT|unix.MS_BIND|flags, ""); err != nil {
		return fmt.Errorf("restrict %s: %w", from, err)
	}
	return nil
}

// pivot makes dir the root and lets go of the old one (pivot_root(2), "pivot_root(".", ".")").
func pivot(dir string) error {
	if err := unix.Chdir(dir); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave old root: %w", err)
	}
	return unix.Chdir("/")
}
