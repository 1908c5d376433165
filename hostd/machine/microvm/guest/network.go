package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"text/template"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/agentlink"
)

//go:embed guest.nft
var rulesText string

var rules = template.Must(template.New("guest.nft").Parse(rulesText))

// links is what ip(8) is told. The neighbour entry is permanent: there is no
// ARP between guest and slot, and the slot would not answer it.
func links() string {
	return strings.Join([]string{
		"link set lo up",
		"link set eth0 up",
		"addr add " + agentlink.GuestAddr + "/30 dev eth0",
		"neigh replace " + agentlink.TapAddr + " lladdr " + agentlink.TapMAC + " nud permanent dev eth0",
		"route add default via " + agentlink.TapAddr,
	}, "\n") + "\n"
}

// firewall is what nft(8) is told.
func firewall() (string, error) {
	var text bytes.Buffer
	err := rules.Execute(&text, map[string]any{
		"BrowserGID": agentlink.BrowserGID, "SlotAddr": agentlink.SlotAddr, "EgressPort": agentlink.EgressPort,
		"TapAddr": agentlink.TapAddr, "AgentPort": agentlink.AgentPort})
	return text.String(), err
}

// bringUp sets up the network with the image's own tools.
func bringUp() error {
	text, err := firewall()
	if err != nil {
		return err
	}
	if err := tell(text, "/usr/sbin/nft", "-f", "-"); err != nil { // before there is a way out
		return err
	}
	return tell(links(), "/usr/sbin/ip", "-batch", "-")
}

// tell runs a program with a text as its input.
func tell(text, program string, args ...string) error {
	cmd := exec.Command(program, args...)
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", program, err, bytes.TrimSpace(out))
	}
	return nil
}

// listen opens the agent's listening socket and gives its descriptor.
func listen() (int, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	addr := unix.SockaddrInet4{Port: agentlink.AgentPort, Addr: netip.MustParseAddr(agentlink.GuestAddr).As4()}
	if err := unix.Bind(fd, &addr); err != nil {
		return -1, fmt.Errorf("bind %s:%d: %w", agentlink.GuestAddr, agentlink.AgentPort, err)
	}
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return -1, fmt.Errorf("listen: %w", err)
	}
	return fd, nil
}
