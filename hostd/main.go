// Command hostd runs the machines of one host.
//
//	gateway ──host link──▶ server ──▶ session ──▶ pool ──▶ machine (driver) + network (slot)
//	                         │           │                    │
//	                         │           └─▶ eventlog, book   └─▶ agent ◀── tunnel ◀── gateway
//	                       gossip                     slot's egress listener ──▶ proxyd
//	                         │                                                     │
//	                         └─▶ refusals ◀── feed of each proxyd of the region ───┘
//
// Machines outlive hostd: stopping it leaves them running, and the next start
// adopts them. "hostd cleanup" ends them all.
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/book"
	"github.com/berth-dev/berth/hostd/eventlog"
	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/network"
	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/hostd/refusals"
	"github.com/berth-dev/berth/hostd/server"
	hostsession "github.com/berth-dev/berth/hostd/session"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/proxylink/loop"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/store"
	"github.com/berth-dev/berth/shared/trust"
)

func main() {
	// Loops, which carry the machines' traffic, hold processors of Go's even where
	// they wait for the kernel's: goroutines keep theirs.
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + loop.Threads())
	var cl commandLine
	cmd := daemon.Parse(&cl, "hostd", "Runs Berth's machines on this host.")
	daemon.Main("hostd", func(ctx context.Context) error {
		if cmd.Command() == "cleanup" {
			return cl.Cleanup.run(ctx)
		}
		return cl.Serve.run(ctx)
	})
}

// host is what runs in the daemon, in order of starting.
type host struct {
	cfg     serveCmd
	log     *slog.Logger
	secret  *trust.Secret
	state   *store.DB // sessions, machines, tombstones
	events  *store.DB // event logs
	snaps   snapshots
	tmpl    *pool.Templates // nil with a driver that keeps no memory
	slots   *pool.Slots     // nil likewise
	book    *book.Book
	logs    *eventlog.Log
	driver  machine.Driver
	net     *network.Network
	members *gossip.Pool
	pool    *pool.Pool
	set     *hostsession.Host
}

func (c serveCmd) run(ctx context.Context) (err error) {
	log := c.Logger("hostd")
	if err := c.complete(); err != nil {
		return err
	}
	for flag, addr := range map[string]string{"--listen": c.Listen, "--gossip-addr": c.GossipAddr} {
		if err := trust.LoopbackOnly(flag, addr); err != nil {
			return err
		}
	}
	h := &host{cfg: c, log: log}
	defer func() { err = errors.Join(err, h.close()) }()
	ln, err := net.Listen("tcp", c.Listen) // first: a second hostd must not touch the machines
	if err != nil {
		return err
	}
	defer ln.Close()
	if err := h.open(ctx); err != nil {
		return err
	}
	return h.serve(ctx, ln)
}

// open brings up everything but the listener.
func (h *host) open(ctx context.Context) (err error) {
	if h.secret, err = trust.LoadOrCreate(h.cfg.ClusterSecret); err != nil {
		return err
	}
	if h.state, err = store.Open(filepath.Join(h.cfg.Home, "hostd.db"), store.Options{}); err != nil {
		return err
	}
	if h.events, err = openEvents(filepath.Join(h.cfg.Home, "events.db"), h.log); err != nil {
		return err
	}
	h.book, h.logs = book.New(h.state), eventlog.New(h.events)
	if h.snaps, err = openSnapshots(ctx, h.cfg.Snapshots, h.cfg.BlobURL, h.log); err != nil {
		return err
	}
	if err := h.openMachines(ctx); err != nil {
		return err
	}
	// How much is free shows when the machines are adopted. Until then the host
	// says it has room: the listener is open, and a create waits there, where
	// "full" would make a cluster of one refuse it.
	h.members, err = gossip.Join(gossip.Config{Name: h.cfg.Name, Bind: h.cfg.GossipAddr, Join: h.cfg.Join,
		Key: h.secret.Key("gossip"), Log: h.log,
		Meta: gossip.Meta{Role: gossip.Hostd, Region: h.cfg.Region, Addr: h.cfg.Listen, Driver: h.driver.Name(), CPUClass: h.cpuClass(), Free: h.cfg.MaxMachines}})
	if err != nil {
		return err
	}
	return h.openSessions(ctx)
}

// openEvents opens the event logs. They are written without fsync: a power
// failure may damage the file, which then makes way for a new one; the machines
// are gone then too.
func openEvents(path string, log *slog.Logger) (*store.DB, error) {
	o := store.Options{NoSync: true}
	db, err := store.Open(path, o)
	if err == nil || errors.Is(err, store.ErrLocked) {
		return db, err
	}
	log.Error("the event logs are damaged; new ones begin", "kept", path+".damaged", "error", err)
	if e := os.Rename(path, path+".damaged"); e != nil {
		return nil, errors.Join(err, e)
	}
	return store.Open(path, o)
}

func (h *host) openMachines(ctx context.Context) (err error) {
	// Machines become this process's children when runc leaves, so that the
	// driver reaps them at once, however slow the host's init is.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become subreaper: %w", err)
	}
	if h.driver, err = h.cfg.driver(ctx, h.log); err != nil {
		return err
	}
	h.log.Info("machine driver "+h.driver.Name(), "isolation", h.driver.Isolation())
	if err := h.cfg.sweepOthers(ctx, h.driver.Name(), h.log); err != nil {
		h.log.Warn("not every machine of the driver that ran here before could be removed", "error", err)
	}
	h.net, err = h.cfg.network(ctx, h.driver.Name() == driverMicrovm, h.log)
	return err
}

// openSessions sweeps what a crash left, and adopts what outlived it.
func (h *host) openSessions(ctx context.Context) error {
	target, err := parsePool("--pool", h.cfg.Pool)
	if err != nil {
		return err
	}
	minimum, err := parsePool("--pool-min", h.cfg.PoolMin)
	if err != nil {
		return err
	}
	if err := h.sweepMachines(ctx); err != nil {
		h.log.Warn("not every machine that an earlier hostd left could be removed", "error", err)
	}
	makeSlot := func(ctx context.Context) (pool.Slot, error) { return slotOf(h.net.Make(ctx)) }
	takeSlot := makeSlot
	keeper, _ := h.driver.(machine.Keeper)
	if keeper != nil {
		h.slots = pool.NewSlots(makeSlot, spareSlotCalm, h.log)
		makeSlot, takeSlot = h.slots.Make, h.slots.Take
		h.tmpl = pool.NewTemplates(keeper, makeSlot, h.siblings)
	}
	boot := pool.Bootstrap{Driver: h.driver, Persist: h.book.PutMachine, Forget: h.book.DeleteMachine,
		Sizes: h.cfg.Sizes, Disk: h.cfg.DiskGiB << 30, Pids: h.cfg.Pids, Deadline: h.cfg.BootDeadline,
		Template: h.cfg.recipe(h.driver.Name()), Templates: h.tmpl, MakeSlot: makeSlot, TakeSlot: takeSlot,
		OpenSlot: func(ctx context.Context, s machine.Slot) (pool.Slot, error) { return slotOf(h.net.Adopt(ctx, s)) }}
	h.pool = pool.New(pool.Config{Target: target, Minimum: minimum, Parallel: h.cfg.PoolParallel, Pace: h.cfg.PoolPace, Calm: h.cfg.PoolCalm,
		MaxAge: h.cfg.PoolMaxAge, MaxTotal: h.cfg.MaxMachines, Finish: boot.Finish}, boot.Boot, h.log)
	cfg := hostsession.Config{Name: h.cfg.Name, Pool: h.pool, Book: h.book, Events: h.logs, Snapshots: h.snaps,
		Egress: newProxyds(h.members, h.cfg.Region, h.cfg.Name, h.secret.Proof(), h.log).way, Keeper: keeper, Rebuild: boot.Restore, Log: h.log,
		Peers: func(addr string) hostsession.Peer { return hostlink.NewClient(addr, h.secret) }}
	cfg.Room = func(k session.Kind) error { return roomFor("/proc/meminfo", h.cfg.Sizes[k]) }
	if h.tmpl != nil {
		cfg.Building = h.tmpl.Building
	}
	if keeper != nil { // hostd may have died between the start of a clone and its first thaw
		cfg.Wake = boot.Wake
	}
	h.set = hostsession.NewHost(cfg)
	if err := h.set.Adopt(ctx, boot.Revive, boot.Current); err != nil {
		return err
	}
	h.pruneTemplates(ctx, boot)
	// Only now: slots of machines that live are open here, and the sweep leaves
	// those alone.
	if err := h.net.Sweep(ctx, func(int) bool { return false }); err != nil {
		h.log.Warn("not every slot that an earlier hostd left could be removed", "error", err)
	}
	return nil
}

// spareSlotCalm is how long after a resume the next one's slot is made.
const spareSlotCalm = 5 * time.Second

// pruneTemplates removes the templates that nothing here needs. With a blob store
// they stay for as long as a session may be paused: this host may be asked to
// resume one of a host that is lost, and templates come from hosts only.
func (h *host) pruneTemplates(ctx context.Context, boot pool.Bootstrap) {
	paused, all := h.snaps.Templates()
	if !all {
		h.log.Warn("no template is removed: a snapshot cannot be read, which may need it")
		return
	}
	var rest time.Duration
	if h.cfg.BlobURL != "" {
		rest = session.PausedMax
	}
	removed, err := boot.PruneTemplates(ctx, paused, rest)
	if err != nil {
		h.log.Warn("not every template of no more use could be removed", "error", err)
	}
	if len(removed) > 0 {
		h.log.Info("templates of no more use were removed", "templates", removed)
	}
}

// cpuClass says which memories this host can go on with; empty for none.
func (h *host) cpuClass() string {
	if k, ok := h.driver.(machine.Keeper); ok {
		return k.CPUClass()
	}
	return ""
}

// siblings are the other living hosts with this driver and CPU class.
func (h *host) siblings() []pool.Sibling {
	var all []pool.Sibling
	for _, m := range h.members.Members(gossip.Hostd) {
		if m.Name != h.cfg.Name && m.Driver == h.driver.Name() && m.CPUClass == h.cpuClass() {
			all = append(all, pool.Sibling{Host: hostlink.NewClient(m.Addr, h.secret), First: m.Name < h.cfg.Name})
		}
	}
	return all
}

// slot gives network.Slot the shape the pool wants.
type slot struct{ *network.Slot }

func slotOf(s *network.Slot, err error) (pool.Slot, error) {
	if err != nil {
		return nil, err
	}
	return slot{s}, nil
}

func (s slot) SetEgress(dial func(context.Context) (net.Conn, error)) { s.Slot.SetEgress(dial) }

// sweepMachines ends what runs on the host and is not in the book.
func (h *host) sweepMachines(ctx context.Context) error {
	handles, err := h.book.Machines()
	if err != nil {
		return err
	}
	ids := map[string]bool{}
	for _, m := range handles {
		ids[m.Spec.ID] = true
	}
	return h.driver.Sweep(ctx, func(id string) bool { return ids[id] })
}

func (h *host) serve(ctx context.Context, ln net.Listener) error {
	mux := http.NewServeMux()
	daemon.Health(mux, h.pool.Filled)
	server.New(mux, h.secret, h.set, h.logs, h.log)
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, // longer than gateways keep theirs
		ErrorLog: slog.NewLogLogger(h.log.Handler(), slog.LevelWarn)}
	g, ctx := errgroup.WithContext(ctx)
	srv.BaseContext = func(net.Listener) context.Context { return ctx } // streams end when the daemon does
	g.Go(func() error { return h.pool.Run(ctx) })
	if h.slots != nil {
		g.Go(func() error { return h.slots.Run(ctx) })
	}
	g.Go(func() error { return h.advertise(ctx) })
	g.Go(func() error { return h.housekeep(ctx) })
	g.Go(func() error {
		refusals.Run(ctx, refusals.Config{Host: h.cfg.Name, Region: h.cfg.Region, Members: h.members, Sessions: h.set, Log: h.log,
			Open: func(addr string) refusals.Feed { return proxylink.NewClient(addr, h.secret) }})
		return nil
	})
	g.Go(func() error {
		if err := srv.Serve(ln); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if srv.Shutdown(stop) != nil {
			srv.Close()
		}
		return context.Cause(ctx)
	})
	h.log.Info("hostd is up", "listen", h.cfg.Listen, "host", h.cfg.Name, "region", h.cfg.Region)
	return g.Wait()
}

// advertise tells the cluster how much is free here.
func (h *host) advertise(ctx context.Context) error {
	for {
		changed := h.pool.Changed()
		ready := h.pool.Ready()
		warm := make(map[string]int, len(ready))
		for kind, n := range ready {
			warm[string(kind)] = n
		}
		if err := h.members.Update(func(m *gossip.Meta) { m.Free, m.Warm = h.pool.Free(), warm }); err != nil {
			h.log.Error("gateways do not hear what is free here", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// housekeep forgets what is old.
func (h *host) housekeep(ctx context.Context) error {
	tick := time.NewTicker(10 * time.Minute)
	defer tick.Stop()
	for {
		before := time.Now().Add(-event.KeepAfterEnd)
		if err := errors.Join(h.book.Forget(before), h.logs.Forget(before)); err != nil {
			h.log.Warn("old records could not be removed", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// close gives back, in reverse, what open acquired; machines stay.
func (h *host) close() error {
	var errs []error
	if h.set != nil {
		h.set.Close()
	}
	if h.members != nil {
		errs = append(errs, h.members.Leave(time.Second))
	}
	if h.tmpl != nil {
		h.tmpl.Close()
	}
	if h.net != nil {
		errs = append(errs, h.net.Close())
	}
	if h.driver != nil {
		errs = append(errs, h.driver.Close())
	}
	if h.snaps.Store != nil {
		errs = append(errs, h.snaps.close())
	}
	for _, db := range []*store.DB{h.events, h.state} {
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	return errors.Join(errs...)
}

// network opens the slots; tap gives each a device for a machine with a kernel of
// its own.
func (c hostConfig) network(ctx context.Context, tap bool, log *slog.Logger) (*network.Network, error) {
	allow, err := c.allow()
	if err != nil {
		return nil, err
	}
	resolvers := make([]netip.AddrPort, len(c.Resolvers))
	for i, r := range c.Resolvers {
		if resolvers[i], err = netip.ParseAddrPort(r); err != nil {
			return nil, fmt.Errorf("--resolvers: %q is not like 9.9.9.9:53: %w", r, err)
		}
	}
	return network.Open(ctx, network.Config{Name: c.SlotPrefix, Subnet: c.Subnet, UIDBase: c.UIDBase, Allow: allow, Resolvers: resolvers, Tap: tap, Log: log})
}

// run ends everything below Home and forgets it.
func (c cleanupCmd) run(ctx context.Context) error {
	log := c.Logger("hostd")
	home, err := filepath.Abs(c.Home)
	if err != nil {
		return err
	}
	c.Home = home
	db, err := store.Open(filepath.Join(c.Home, "hostd.db"), store.Options{})
	if err != nil {
		return err
	}
	defer db.Close()
	n, err := c.network(ctx, false, log)
	if err != nil {
		return err
	}
	b := book.New(db)
	// Sessions stay in the book: the next start finds their machines gone and
	// leaves tombstones for the record.
	handles, err := b.Machines()
	for _, h := range handles {
		err = errors.Join(err, b.DeleteMachine(h.Spec.ID))
	}
	return errors.Join(err, c.sweepOthers(ctx, "", log), n.Destroy(ctx))
}
