package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// proxies are the peers of proxyd, as Debian has them, each one process in the
// foreground that keeps no log and no cache.
type proxies struct {
	dir  string
	base int
	cmds []*exec.Cmd
}

// Ports of the peers, beyond the stack's base; daemons.sh has those below.
const (
	tinyPort    = 251
	squidPort   = 252
	haproxyPort = 253
)

const tinyConf = `Port %d
Listen 127.0.0.1
Timeout 600
MaxClients 600
Allow 127.0.0.1
LogLevel Critical
`

const squidConf = `http_port 127.0.0.1:%d
acl every port 1-65535
http_access allow every
access_log none
cache_log /dev/null
cache deny all
cache_mem 8 MB
pid_filename none
shutdown_lifetime 0 seconds
coredump_dir %s
`

const haproxyConf = `global
  maxconn 4000
defaults
  mode tcp
  option splice-auto
  timeout connect 5s
  timeout client 60s
  timeout server 60s
listen bulk
  bind 127.0.0.1:%d
  server site %s
`

// startProxies starts them and waits until they accept. HAProxy, which has no
// CONNECT, leads to one site.
func startProxies(base int, site string) (*proxies, error) {
	dir, err := os.MkdirTemp(filepath.Dir(os.Getenv("BERTH_HOME")), "berth-bench-proxies.")
	if err != nil {
		return nil, err
	}
	p := &proxies{dir: dir, base: base}
	for _, peer := range []struct {
		port int
		conf string
		args []string
	}{
		{tinyPort, fmt.Sprintf(tinyConf, base+tinyPort), []string{"tinyproxy", "-d", "-c"}},
		{squidPort, fmt.Sprintf(squidConf, base+squidPort, dir), []string{"squid", "-N", "-f"}},
		{haproxyPort, fmt.Sprintf(haproxyConf, base+haproxyPort, site), []string{"haproxy", "-db", "-f"}},
	} {
		if err := p.start(base+peer.port, peer.conf, peer.args); err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", peer.args[0], err), p.close())
		}
	}
	return p, nil
}

func (p *proxies) start(port int, conf string, args []string) error {
	file := filepath.Join(p.dir, args[0]+".conf")
	if err := os.WriteFile(file, []byte(conf), 0o644); err != nil {
		return err
	}
	cmd := exec.Command(args[0], append(args[1:], file)...)
	cmd.Dir = p.dir
	if err := cmd.Start(); err != nil {
		return err
	}
	p.cmds = append(p.cmds, cmd)
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	return poll(context.Background(), 20*time.Second, addr+" accepts", func() (bool, error) {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			return false, err
		}
		return true, conn.Close()
	})
}

// lanes lead through them.
func (p *proxies) lanes() (tiny, squid, haproxy lane) {
	at := func(port, i int, direct bool) lane {
		return lane{Addr: fmt.Sprintf("127.0.0.1:%d", p.base+port), Direct: direct, pid: p.cmds[i].Process.Pid}
	}
	return at(tinyPort, 0, false), at(squidPort, 1, false), at(haproxyPort, 2, true)
}

// close ends them; nil is none.
func (p *proxies) close() error {
	if p == nil {
		return nil
	}
	for _, cmd := range p.cmds {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed, as it says
	}
	return os.RemoveAll(p.dir)
}
