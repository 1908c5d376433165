package gossip

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"unicode/utf8"
)

// Role is what a member is.
type Role string

// The roles.
const (
	Gateway Role = "gateway"
	Hostd   Role = "hostd"
	Proxyd  Role = "proxyd"
)

// MetaLimit is what memberlist carries for a member, bytes.
const MetaLimit = 512

// Meta is what a member tells the pool about itself. It is a hint to all
// others, never ownership.
type Meta struct {
	Role     Role
	Region   string
	Addr     string         // host:port of the member's service, not of its gossip
	Control  string         // proxyd: host:port of its ledger and feed
	Driver   string         // hostd: oci, microvm
	Free     int            // hostd: slots left
	Warm     map[string]int // hostd: warm machines by session kind; zeroes are left out
	CPUClass string         // hostd: which memory captures fit
}

// wireMeta has short names because 512 bytes must hold it.
type wireMeta struct {
	Version  int            `json:"v"`
	Role     Role           `json:"r"`
	Region   string         `json:"g,omitempty"`
	Addr     string         `json:"a"`
	Control  string         `json:"k,omitempty"`
	Driver   string         `json:"d,omitempty"`
	Free     int            `json:"f,omitempty"`
	Warm     map[string]int `json:"w,omitempty"`
	CPUClass string         `json:"c,omitempty"`
}

const metaVersion = 1

// encode gives the wire form; a meta that no peer would accept is an error.
func (m Meta) encode() ([]byte, error) {
	if err := m.check(); err != nil {
		return nil, err
	}
	w := wireMeta{Version: metaVersion, Role: m.Role, Region: m.Region, Addr: m.Addr, Control: m.Control, Driver: m.Driver, Free: m.Free, CPUClass: m.CPUClass}
	for kind, n := range m.Warm {
		if n != 0 {
			if w.Warm == nil {
				w.Warm = make(map[string]int, len(m.Warm))
			}
			w.Warm[kind] = n
		}
	}
	b, err := json.Marshal(w)
	if err == nil && len(b) > MetaLimit {
		err = fmt.Errorf("gossip: what this member tells of itself takes %d bytes, the limit is %d: shorten region, address or CPU class", len(b), MetaLimit)
	}
	return b, err
}

// decodeMeta reads a peer's wire form. Fields it does not know are skipped, so
// that a newer peer stays visible.
func decodeMeta(b []byte) (Meta, error) {
	var w wireMeta
	if err := json.Unmarshal(b, &w); err != nil {
		return Meta{}, fmt.Errorf("gossip: foreign meta: %w", err)
	}
	if w.Version != metaVersion {
		return Meta{}, fmt.Errorf("gossip: meta of version %d", w.Version)
	}
	m := Meta{w.Role, w.Region, w.Addr, w.Control, w.Driver, w.Free, w.Warm, w.CPUClass}
	return m, m.check()
}

func (m Meta) check() error {
	switch m.Role {
	case Gateway, Hostd, Proxyd:
	default:
		return fmt.Errorf("gossip: %q is no role", m.Role)
	}
	if _, _, err := net.SplitHostPort(m.Addr); err != nil {
		return fmt.Errorf("gossip: service address: %w", err)
	}
	if m.Control != "" {
		if _, _, err := net.SplitHostPort(m.Control); err != nil {
			return fmt.Errorf("gossip: control address: %w", err)
		}
	}
	for _, s := range []string{m.Region, m.Addr, m.Control, m.Driver, m.CPUClass} {
		if !utf8.ValidString(s) {
			return errors.New("gossip: meta holds text that is not UTF-8")
		}
	}
	if m.Free < 0 {
		return fmt.Errorf("gossip: %d free slots", m.Free)
	}
	for kind, n := range m.Warm {
		if n < 0 {
			return fmt.Errorf("gossip: %d warm machines of kind %q", n, kind)
		}
	}
	return nil
}

// clone keeps readers' copies apart from the pool's own.
func (m Meta) clone() Meta {
	if m.Warm != nil {
		warm := make(map[string]int, len(m.Warm))
		for k, n := range m.Warm {
			warm[k] = n
		}
		m.Warm = warm
	}
	return m
}
