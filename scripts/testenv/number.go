package testenv

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// stacks is how many stacks one computer can run at once. A stack's number
// gives it ports, names, networks and user ids that no other one has.
const stacks = 8

// numbersDir holds one locked file for each number in use. Inside is the home
// of the stack that has or had the number, so that what a killed test left
// behind is found and removed by the next one.
const numbersDir = "/tmp/berth-testenv"

// number is a claimed stack number.
type number struct {
	n    int
	lock *os.File
}

// claimNumber takes the lowest free number. left is the home of a stack that
// ended without cleaning up, empty if none did.
func claimNumber() (num number, left string, err error) {
	if err := os.MkdirAll(numbersDir, 0o700); err != nil {
		return num, "", err
	}
	for n := range stacks {
		f, err := os.OpenFile(filepath.Join(numbersDir, fmt.Sprint(n)), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return num, "", err
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
			f.Close()
			continue
		}
		b, err := os.ReadFile(f.Name())
		return number{n, f}, strings.TrimSpace(string(b)), err
	}
	return num, "", fmt.Errorf("%d stacks run already", stacks)
}

// note writes the home into the number's file; empty says that all is clean.
func (n number) note(home string) error {
	if err := n.lock.Truncate(0); err != nil {
		return err
	}
	_, err := n.lock.WriteAt([]byte(home), 0)
	return err
}

func (n number) release() { n.lock.Close() }

// port gives the i-th port, below those that the kernel hands out by itself
// (ip_local_port_range), so that it is still free after a daemon's restart.
func (n number) port(i int) string { return fmt.Sprintf("127.0.0.1:%d", 21000+n.n*20+i) }

// maxHosts is how many hostds a stack may have, maxProxyds how many proxyds;
// ports is how many ports it takes.
const (
	maxHosts   = 2
	maxProxyds = 2
	ports      = 3 + 2*maxHosts + 3*maxProxyds
)

// hostPort gives the k-th of the two ports of the i-th hostd.
func (n number) hostPort(i, k int) string { return n.port([maxHosts][2]int{{3, 4}, {8, 9}}[i][k]) }

// proxydPort gives the k-th of the three ports of the i-th proxyd.
func (n number) proxydPort(i, k int) string {
	return n.port([maxProxyds][3]int{{5, 6, 7}, {10, 11, 12}}[i][k])
}

func (n number) prefix(host int) string {
	return fmt.Sprintf("btest%d%s", n.n, [maxHosts]string{"", "b"}[host])
}
func (n number) subnet(host int) string { return fmt.Sprintf("10.%d.%d.0/20", 236+n.n, 16*host) }

// uidBase is above those that daemons.sh hands out.
func (n number) uidBase(host int) uint32 { return uint32(55_000+(host*stacks+n.n)*512) << 16 }

// slots is how many addresses subnet has, and so how many user id ranges.
const slots = 510

// allowed and closed are the networks of web hosts: sessions may reach the
// first, by --egress-allow, and not the second.
func (n number) allowed() string { return fmt.Sprintf("10.%d.64.0/18", 236+n.n) }
func (n number) webAddr(closed bool, i int) (host, web string) {
	third := 64 + i
	if closed {
		third = 128 + i
	}
	return fmt.Sprintf("10.%d.%d.1", 236+n.n, third), fmt.Sprintf("10.%d.%d.2", 236+n.n, third)
}

// freePorts fails when somebody else listens on one of the ports.
func (n number) freePorts(count int) error {
	for i := range count {
		l, err := net.Listen("tcp", n.port(i))
		if err != nil {
			return fmt.Errorf("port of stack %d: %w", n.n, err)
		}
		l.Close()
	}
	return nil
}
