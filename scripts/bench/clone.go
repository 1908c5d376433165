package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/berth-dev/berth/shared/api"
)

// start: a session on an empty pool, so that its machine starts from the
// template, from the request to the first CDP answer; beside the boot of the
// very guest that became the template, from the start of QEMU until its agent
// said that Chrome waits.
func (b *bench) start(ctx context.Context) error {
	if err := b.warm(ctx); err != nil {
		return err
	}
	boot, err := b.stack.timing(ctx, "berth_template_boot_seconds", `kind="both"`)
	if err != nil {
		return err
	}
	if boot.count == 0 {
		return errors.New("no template was built in this run")
	}
	before, err := b.stack.timing(ctx, "berth_machine_start_seconds", `kind="both",step="start"`)
	if err != nil {
		return err
	}
	var took samples
	side := func(ctx context.Context, counts bool) error {
		into := &took
		if !counts {
			into = nil
		}
		s, err := b.firstReply(ctx, "both", into)
		if err != nil {
			return err
		}
		return errors.Join(b.stack.release(ctx, s.Id), b.stack.quiet(ctx))
	}
	if err := interleave(ctx, 1, b.rounds(4, 2), side); err != nil {
		return err
	}
	after, err := b.stack.timing(ctx, "berth_machine_start_seconds", `kind="both",step="start"`)
	if err != nil {
		return err
	}
	b.add(figure{What: "start from template to a running guest (`cont`)", Beside: "cold boot of the same guest, until Chrome waits", Unit: "ms", Plain: true,
		Value: after.since(before), Peer: 1000 * boot.sum / boot.count, Count: len(took), Note: "a mean; slot, disk, QEMU, memory, devices, and the agent's port open"})
	b.add(figure{What: "start from template to first CDP reply", Beside: "cold boot of the same guest, until Chrome waits", Unit: "ms",
		Value: took.median(), Peer: 1000 * boot.sum / boot.count, Now: 1.0 / 20, Aim: 1.0 / 40, Count: len(took),
		Note: fmt.Sprintf("the reply of Browser.getVersion; a page comes a little later, or when the client wants one; emulated: QEMU begins with no translated code; cold boots: %.0f", boot.count)})
	return nil
}

// clone: the memory that an idle machine adds, beside that of QEMU when the
// machine whose boot became the template had got as far, PSS.
// The guest's kernel fills all its memory with zeros as it boots (init_on_free),
// and so has all of it; the zeros are left out, as if it did not.
func (b *bench) clone(ctx context.Context) error {
	const many = 3
	if err := b.warm(ctx); err != nil {
		return err
	}
	boot, err := b.stack.timing(ctx, "berth_template_boot_bytes", `kind="both"`)
	if err != nil || boot.count == 0 {
		return fmt.Errorf("no template was built in this run: %w", err)
	}
	whole, used, err := b.stack.guestMemory()
	if err != nil {
		return err
	}
	var each, guests samples
	side := func(ctx context.Context, counts bool) error {
		all, guest, err := b.grow(ctx, many)
		if counts && err == nil {
			each, guests = append(each, all), append(guests, guest)
		}
		return errors.Join(err, b.stack.quiet(ctx))
	}
	if err := interleave(ctx, 0, 1, side); err != nil {
		return err
	}
	b.add(figure{What: "memory of one more idle microVM, what QEMU alone holds", Beside: "the same guest cold-booted, PSS", Unit: "MiB",
		Value: each.median(), Peer: (boot.sum/boot.count - whole + used) / (1 << 20), Now: 0.3, Aim: 0.15, Count: many,
		Note: fmt.Sprintf("emulated: both sides hold QEMU's translated code as well, which KVM has not; the peer without its %.0f MiB of zeros", (whole-used)/(1<<20))})
	b.add(figure{What: "of that, the guest's memory, without QEMU's own", Beside: "the same guest cold-booted, without its zeros", Unit: "MiB", Plain: true,
		Value: guests.median(), Peer: used / (1 << 20), Count: many})
	return nil
}

// grow starts machines and gives what each of them alone holds, in MiB: pages
// of its own. Those of the template are in memory whether a machine maps them
// or not (and the kernel calls them dirty, since they come from no disk).
func (b *bench) grow(ctx context.Context, many int) (all, guest float64, err error) {
	var ids []string
	defer func() {
		for _, id := range ids {
			err = errors.Join(err, b.stack.release(context.WithoutCancel(ctx), id))
		}
	}()
	for range many {
		s, err := b.firstReply(ctx, "both", nil)
		if err != nil {
			return 0, 0, err
		}
		ids = append(ids, s.Id)
		if err := b.seePage(ctx, s); err != nil {
			return 0, 0, err
		}
	}
	if err := settleDown(ctx); err != nil {
		return 0, 0, err
	}
	count := 0
	for _, h := range b.stack.hostds() {
		pids := b.stack.qemus(h)
		all += memoryOf(pids, "Anonymous:")
		guest += guestOwn(pids)
		count += len(pids)
	}
	if count != many {
		return 0, 0, fmt.Errorf("%d machines run, not %d", count, many)
	}
	return all / float64(many), guest / float64(many), nil
}

// seePage waits until a machine that was started now has all that one of the
// pool has: its page comes after its first answers.
func (b *bench) seePage(ctx context.Context, s api.Session) error {
	ws, err := openSocket(ctx, *s.ConnectUrl, dialPlain)
	if err != nil {
		return err
	}
	defer ws.close()
	_, err = ws.attach()
	return err
}

// guestOwn is the guest memory that machines have changed, in MiB: pages of
// their own in the map of the template's (proc_pid_smaps(5)).
func guestOwn(pids []int) float64 {
	var kib float64
	for _, pid := range pids {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", pid)) // it may have ended
		ram := false
		for line := range strings.Lines(string(text)) {
			name, rest, _ := strings.Cut(line, " ")
			switch {
			case !strings.HasSuffix(name, ":"): // a mapping begins
				ram = strings.Contains(line, "memfd:berth-template")
			case ram && name == "Anonymous:":
				n, _ := strconv.ParseFloat(strings.Fields(rest)[0], 64)
				kib += n
			}
		}
	}
	return kib / 1024
}
