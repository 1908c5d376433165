// Command guest is the agent of machinetest: the first process of a machine
// under test. On each connection to descriptor 3 it reads one Request as a
// line of JSON and answers with one Reply. It trusts whoever dials, and reaps
// no orphans: they go with the machine.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Request asks for one thing. Do is "echo", "sh" or the name of an attempt.
type Request struct {
	Do   string `json:"do"`
	Text string `json:"text,omitempty"` // echo: comes back; sh: the script
	UID  uint32 `json:"uid,omitempty"`  // sh: runs as
}

// Reply answers it.
type Reply struct {
	Text string `json:"text"` // output of sh, both streams
	Code int    `json:"code"` // exit code of sh, errno of an attempt
}

func main() {
	listener, err := net.FileListener(os.NewFile(3, "agent"))
	if err != nil {
		println("guest: no listener on descriptor 3:", err.Error())
		os.Exit(1)
	}
	println("guest: serving")
	for {
		conn, err := listener.Accept()
		if err != nil {
			os.Exit(2)
		}
		go serve(conn)
	}
}

func serve(conn net.Conn) {
	defer conn.Close()
	var q Request
	line, err := bufio.NewReader(conn).ReadBytes('\n')
	if err != nil || json.Unmarshal(line, &q) != nil {
		return
	}
	_ = json.NewEncoder(conn).Encode(answer(q)) // the test sees a missing reply
}

func answer(q Request) Reply {
	switch q.Do {
	case "echo":
		return Reply{Text: q.Text}
	case "sh":
		return sh(q.Text, q.UID)
	}
	attempt, ok := attempts[q.Do]
	if !ok {
		return Reply{Text: "unknown request", Code: -1}
	}
	if err := attempt(); err != nil {
		var number syscall.Errno
		errors.As(err, &number)
		return Reply{Text: err.Error(), Code: int(number)}
	}
	return Reply{Text: "it worked"}
}

// sh runs a script with bash. Like the real agent it makes its children the
// out-of-memory killer's first choice, before itself.
func sh(script string, uid uint32) Reply {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", "echo 500 > /proc/self/oom_score_adj\n"+script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	cmd.Dir = "/"
	cmd.WaitDelay = time.Second // background children keep the pipe open
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil { // not even started
		return Reply{Text: err.Error(), Code: -1}
	}
	return Reply{Text: string(out), Code: cmd.ProcessState.ExitCode()}
}

// attempts are what a hostile root inside would try. Each must fail.
var attempts = map[string]func() error{
	"mount":               func() error { return unix.Mount("tmpfs", "/mnt", "tmpfs", 0, "") },
	"remount":             func() error { return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND, "") },
	"mountInOwnNamespace": func() error { return unix.Unshare(unix.CLONE_NEWUSER | unix.CLONE_NEWNS) },
	"newMountAPI":         func() error { _, err := unix.Fsopen("tmpfs", 0); return err },
	"module":              func() error { return unix.FinitModule(0, "", 0) },
	"netfilter": func() error {
		_, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER)
		return err
	},
	"packetSocket": func() error { _, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0); return err },
	"deviceNode":   func() error { return unix.Mknod("/root/disk", unix.S_IFBLK|0o600, int(unix.Mkdev(254, 0))) },
	"hostname":     func() error { return unix.Sethostname([]byte("host")) },
	"clock":        func() error { return unix.ClockSettime(unix.CLOCK_REALTIME, &unix.Timespec{Sec: 1}) },
	"reboot":       func() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF) },
	"linkUp":       func() error { return linkUp("lo") },
	"bpf":          func() error { return raw(unix.SYS_BPF) },
	"keyctl":       func() error { return raw(unix.SYS_KEYCTL) },
	"perf":         func() error { return raw(unix.SYS_PERF_EVENT_OPEN) },
	"ioUring":      func() error { return raw(unix.SYS_IO_URING_SETUP) },
	"userfaultfd":  func() error { return raw(unix.SYS_USERFAULTFD) },
	"openByHandle": func() error { return raw(unix.SYS_OPEN_BY_HANDLE_AT) },
	"sysctl":       func() error { return os.WriteFile("/proc/sys/kernel/core_pattern", []byte("|/bin/sh"), 0) },
	"sysrq":        func() error { return os.WriteFile("/proc/sysrq-trigger", []byte("h"), 0) },
}

func raw(number uintptr) error {
	if _, _, e := unix.Syscall6(number, 0, 0, 0, 0, 0, 0); e != 0 {
		return e
	}
	return nil
}

// linkUp changes an interface of the slot, as only the host may.
func linkUp(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	request, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request)
}
