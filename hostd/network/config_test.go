package network

import (
	"bytes"
	"context"
	"net/netip"
	"strings"
	"testing"

	"github.com/berth-dev/berth/shared/egress"
)

func TestConfigIsChecked(t *testing.T) {
	for want, cfg := range map[string]Config{
		"name":        {Name: "Berth"},
		`"a-b"`:       {Name: "a-b"},        // would match another's links
		"up to eight": {Name: "abcdefghij"}, // longer than a link's name can be with the index
		"IPv4":        {Subnet: netip.MustParsePrefix("fd00::/64")},
		"/30":         {Subnet: netip.MustParsePrefix("10.0.0.0/31")},
		"10.0.0.1":    {Subnet: netip.MustParsePrefix("10.0.0.1/24")},
		"multiple":    {UIDBase: 100000},
	} {
		if _, err := Open(context.Background(), cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q in it", cfg, err, want)
		}
	}
}

func TestAddressesAndUsersOfSlots(t *testing.T) {
	cfg := Config{Subnet: netip.MustParsePrefix("10.9.0.0/16")}
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	n := &Network{cfg: cfg}
	last := n.Slots() - 1
	if got := n.addr(0).String() + " " + n.addr(254).String() + " " + n.addr(255).String(); got != "10.9.0.1 10.9.0.255 10.9.1.0" {
		t.Error(got)
	}
	if !cfg.Subnet.Contains(n.addr(last)) {
		t.Errorf("slot %d has %s", last, n.addr(last))
	}
	info := n.info(last)
	if uint64(info.UIDBase)+uidRange > 1<<32 || info.UIDBase != DefaultUIDBase+uint32(last)<<16 {
		t.Errorf("slot %d has user ids from %d", last, info.UIDBase)
	}
	if len(info.Name) > 15 { // IFNAMSIZ less its zero
		t.Errorf("link name %q", info.Name)
	}
	n.cfg.Name = "abcdefghi"
	if name := n.info(last).Name; len(name) > 15 {
		t.Errorf("link name %q", name)
	}
}

func TestRulesHoldTheWholeTable(t *testing.T) {
	cfg := testConfig()
	if err := cfg.complete(); err != nil {
		t.Fatal(err)
	}
	n := &Network{cfg: cfg}
	info := n.info(3)
	var slot, host bytes.Buffer
	if err := slotRules.Execute(&slot, n.ruleData(&info)); err != nil {
		t.Fatal(err)
	}
	if err := hostRules.Execute(&host, n.ruleData(nil)); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{slot.String(), host.String()} {
		for _, p := range egress.NonPublic {
			if strings.Contains(text, p.String()) != p.Addr().Is4() {
				t.Errorf("%s: want IPv4 in, IPv6 out of the rules", p)
			}
		}
		if !strings.Contains(text, "th dport { 25, 465, 587, 2525 }") || !strings.Contains(text, opened) {
			t.Errorf("ports or opened networks are missing:\n%s", text)
		}
	}
	if want := "meta skgid 1246084 goto browser"; !strings.Contains(slot.String(), want) { // 2^20 + 3*2^16 + 900
		t.Errorf("no %q in\n%s", want, slot.String())
	}
}
