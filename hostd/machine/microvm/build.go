package microvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/cgroup"
	"github.com/berth-dev/berth/shared/daemon"
)

const (
	agentPath = "usr/lib/berth/agent"
	// buildUID is who QEMU is while a template is made: an id of no slot.
	buildUID = 0x7fff_0000
)

// build boots a machine once, captures it as a template and gives its hash. The
// caller has entered.
func (d *Driver) build(ctx context.Context, spec machine.Spec, recipe string) (hash string, err error) {
	begin := time.Now()
	b := &build{driver: d, spec: spec, id: newID()}
	if err := os.Mkdir(d.dir(b.id), 0o700); err != nil {
		return "", err
	}
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		err = errors.Join(err, b.close(clean))
	}()
	if b.dir, err = d.store.begin(); err != nil {
		return "", err
	}
	defer os.RemoveAll(b.dir)
	m, err := b.make(ctx)
	if err != nil {
		return "", fmt.Errorf("make a template of kind %s: %w", spec.Kind, err)
	}
	m.Version, m.Recipe, m.CPUClass, m.VCPU = metaVersion, recipe, d.class, spec.Size.VCPU
	if hash, err = d.store.commit(b.dir, m); err != nil {
		return "", err
	}
	d.cfg.Log.Info("template made", "kind", spec.Kind, "template", hash, "seconds", time.Since(begin).Seconds())
	return hash, nil
}

// build is a template in the making.
type build struct {
	driver  *Driver
	spec    machine.Spec
	id      string // of the machine
	dir     string // of the template
	net     *buildNet
	ram     *os.File
	process *cgroup.Process
	qmp     *monitor
}

// close ends the machine and everything of it.
func (b *build) close(ctx context.Context) error {
	var err error
	if b.process != nil { // which may not be in its cgroup yet
		err = end(b.process)
	}
	err = errors.Join(err, b.driver.remove(ctx, b.id))
	if b.qmp != nil {
		_ = b.qmp.Close() // QEMU has gone
	}
	if b.net != nil {
		err = errors.Join(err, b.net.Close())
	}
	if b.ram != nil {
		err = errors.Join(err, b.ram.Close())
	}
	return err
}

func (b *build) make(ctx context.Context) (m meta, err error) {
	base := b.driver.bootFile("disk.ext4")
	if err := link(base, filepath.Join(b.dir, "base")); err != nil {
		return m, err
	}
	if m.Base, err = b.driver.store.sum(filepath.Join(b.dir, "base")); err != nil {
		return m, err
	}
	m.Disk = m.Base.Size + b.spec.DiskBytes
	began := time.Now()
	if err := b.boot(ctx, m.Disk); err != nil {
		return m, err
	}
	if err := b.await(ctx, b.driver.cfg.Ready); err != nil {
		return m, err
	}
	b.tell(time.Since(began))
	if err := b.await(ctx, b.driver.cfg.Settle); err != nil {
		return m, err
	}
	if err := b.qmp.do(ctx, "stop", nil, nil); err != nil {
		return m, err
	}
	return m, b.save(ctx, &m)
}

// boot starts the kernel with the template's memory and disk.
func (b *build) boot(ctx context.Context, disk int64) (err error) {
	d := b.driver
	if b.net, err = newBuildNet(); err != nil {
		return err
	}
	ramBytes := int64(b.spec.Size.GiB) << 30
	if b.ram, err = memoryFile(ramName); err != nil {
		return err
	}
	if err := b.ram.Truncate(ramBytes); err != nil {
		return err
	}
	kernel, err := memoryCopy(d.bootFile("vmlinuz"))
	if err != nil {
		return err
	}
	defer kernel.Close()
	initrd, err := b.initrd()
	if err != nil {
		return err
	}
	defer initrd.Close()
	base, err := os.Open(filepath.Join(b.dir, "base"))
	if err != nil {
		return err
	}
	defer base.Close()
	top, err := d.newLayer(ctx, b.dir, "top", disk)
	if err != nil {
		return err
	}
	defer top.Close()
	console, err := os.OpenFile(filepath.Join(d.dir(b.id), logName), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer console.Close()
	limits := d.limits(b.spec)
	limits.Shares = fullShares // somebody waits for it
	if err := d.groups.Make(d.group(b.id), limits); err != nil {
		return err
	}
	var c command
	c.machine(d.accel, b.spec.Size.VCPU, b.ram, ramBytes, true)
	c.console(console)
	c.node(image("raw", baseNode, c.file(base), false))
	c.node(image("qcow2", topNode, c.file(top), true).over(baseNode))
	c.devices(topNode, b.net.tap)
	c.boot(kernel, initrd, d.kernelParams(b.spec))
	if b.process, err = d.spawn(b.id, buildUID, fileLimit(disk), c); err != nil {
		return err
	}
	b.qmp, err = dialMonitor(ctx, d.dir(b.id))
	return b.why(err)
}

// why adds what the guest's console said to an error.
func (b *build) why(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w; console: %s", err, b.driver.lastWords(b.id))
}

// await waits until the agent has done something, or the machine has ended.
func (b *build) await(ctx context.Context, do func(context.Context, Dial) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if b.process.Wait() {
			cancel(errors.New("the guest's kernel ended"))
		}
	}()
	err := do(ctx, b.dial)
	if err != nil {
		return b.why(errors.Join(err, context.Cause(ctx)))
	}
	return nil
}

// tell keeps what a boot costs, to compare machines that start from the template
// with: the time until the agent waits, and the memory of QEMU, guest included.
func (b *build) tell(took time.Duration) {
	daemon.Histogram(fmt.Sprintf("berth_template_boot_seconds{kind=%q}", b.spec.Kind)).Update(took.Seconds())
	bytes, err := residentBytes(b.process.Pid())
	if err != nil {
		b.driver.cfg.Log.Warn("the memory of a template's boot is not known", "error", err)
		return
	}
	daemon.Histogram(fmt.Sprintf("berth_template_boot_bytes{kind=%q}", b.spec.Kind)).Update(float64(bytes))
}

// residentBytes is a process's proportional share of memory (proc(5), smaps_rollup).
func residentBytes(pid int) (int64, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(data), "\nPss:")
	var kib int64
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		return 0, fmt.Errorf("smaps_rollup: %w", err)
	}
	return kib << 10, nil
}

// dial tries until the guest has booted so far that it answers.
func (b *build) dial(ctx context.Context) (net.Conn, error) {
	for {
		try, cancel := context.WithTimeout(ctx, time.Second)
		conn, err := dialAgent(try, b.net.path())
		cancel()
		if err == nil {
			return conn, nil
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// save writes the stopped machine into the template's folder.
func (b *build) save(ctx context.Context, m *meta) error {
	device := filepath.Join(b.dir, "device")
	if err := b.qmp.saveDevices(ctx, device); err != nil {
		return err
	}
	if err := b.qmp.do(ctx, "quit", nil, nil); err != nil { // the disk's last words
		return err
	}
	if !b.process.Wait() {
		return errors.New("QEMU did not end")
	}
	ram, err := os.OpenFile(filepath.Join(b.dir, "ram"), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer ram.Close()
	if m.RAM, err = copyBlocks(ram, b.ram); err != nil {
		return err
	}
	if m.Device, err = b.driver.store.sum(device); err != nil {
		return err
	}
	m.Top, err = b.driver.store.sum(filepath.Join(b.dir, "top.qcow2"))
	return err
}

func (d *Driver) limits(spec machine.Spec) cgroup.Limits {
	return cgroup.Limits{
		Memory: int64(spec.Size.GiB)<<30 + d.accel.overhead(),
		Pids:   64 + 4*spec.Size.VCPU, // threads of QEMU, which may start no process
		Shares: uint64(backgroundShares * spec.Size.VCPU),
		Cores:  burst * spec.Size.VCPU,
	}
}

// fileLimit is what a layer of a full disk may take: the disk and the image
// format's tables.
func fileLimit(disk int64) int64 { return disk + disk/256 + 64<<20 }

// kernelParams: a panic ends the machine; freed memory is zero, so that a
// capture has little; the processes that a machine may have are limited for
// all users together, which leaves some to the kernel.
func (d *Driver) kernelParams(spec machine.Spec) string {
	return fmt.Sprintf("console=ttyS0 loglevel=4 panic=-1 reboot=t init_on_free=1 sysctl.kernel.threads-max=%d",
		spec.Pids+kernelThreads) + d.accel.params()
}

const kernelThreads = 128

// initrd is the initramfs with this agent and its arguments behind it.
func (b *build) initrd() (*os.File, error) {
	f, err := memoryCopy(b.driver.bootFile("initrd"))
	if err != nil {
		return nil, err
	}
	agent, err := os.ReadFile(b.driver.agentFile())
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	var archive bytes.Buffer
	archive.Write(make([]byte, padding(f)))
	args := "--kind\x00" + string(b.spec.Kind) + "\x00"
	writeCPIO(&archive, cpioFile{"agent", 0o755, agent}, cpioFile{"agent.args", 0o644, []byte(args)})
	if _, err := f.Write(archive.Bytes()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// padding fills up to four bytes: an archive begins there.
func padding(f *os.File) int64 {
	at, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return 0 // the write that follows fails too
	}
	return -at & 3
}

// memoryFile is a file without a name that every user may open by descriptor.
func memoryFile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// memoryCopy copies a file into memory, where QEMU may read it without being
// able to see, or to have the rights to, the original.
func memoryCopy(path string) (*os.File, error) {
	from, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	f, err := memoryFile("berth-boot")
	if err != nil {
		return nil, err
	}
	if _, err := io.Copy(f, from); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
