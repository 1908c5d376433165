package network

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"text/template"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/egress"
)

//go:embed slot.nft
var slotText string

//go:embed host.nft
var hostText string

var (
	slotRules = template.Must(template.New("slot.nft").Funcs(ruleFuncs).Parse(slotText))
	hostRules = template.Must(template.New("host.nft").Funcs(ruleFuncs).Parse(hostText))

	ruleFuncs = template.FuncMap{"join": func(list any) string {
		return strings.Trim(strings.Join(strings.Fields(fmt.Sprint(list)), ", "), "[]")
	}}
)

// ruleData fills both templates.
type ruleData struct {
	Name           string
	Subnet         netip.Prefix
	Closed, Opened []netip.Prefix // IPv4 only: no IPv6 leaves a slot
	MailPorts      []uint16
	SlotAddr       string
	EgressPort     int
	BrowserGID     uint32 // of the host; slot rules only
	Guest          *guest // what is behind the tap device; nil without one
}

// guest is a machine with a kernel of its own, as rules see it.
type guest struct {
	Tap, Addr, MAC     string
	AgentPort, DNSPort int
}

// ruleData gives the data of a slot's rules, or of the host's for nil.
func (n *Network) ruleData(slot *machine.Slot) ruleData {
	d := ruleData{Name: n.cfg.Name, Subnet: n.cfg.Subnet, Closed: only4(egress.NonPublic), Opened: only4(n.cfg.Allow),
		MailPorts: egress.MailPorts, SlotAddr: agentlink.SlotAddr, EgressPort: agentlink.EgressPort}
	if slot != nil {
		d.BrowserGID = slot.UIDBase + agentlink.BrowserGID
		if n.cfg.Tap {
			d.Guest = &guest{agentlink.TapName, agentlink.GuestAddr, agentlink.GuestMAC, agentlink.AgentPort, agentlink.DNSPort}
		}
	}
	return d
}

func only4(list []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range list {
		if p.Addr().Is4() {
			out = append(out, p)
		}
	}
	return out
}

// loadRules renders a template and puts it in force in the namespace of the
// calling thread, all of it or nothing.
func loadRules(ctx context.Context, t *template.Template, d ruleData) error {
	var text bytes.Buffer
	if err := t.Execute(&text, d); err != nil {
		return fmt.Errorf("rules: %w", err)
	}
	return nft(ctx, text.String())
}

// nft runs nft -f in the namespace of the calling thread: a child starts in
// the namespaces of the thread that forks it.
func nft(ctx context.Context, script string) error {
	cmd := exec.CommandContext(ctx, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}
