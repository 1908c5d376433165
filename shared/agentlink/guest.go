package agentlink

import "fmt"

// What is the same inside every machine, whatever runs it. Image, agent,
// slots and drivers must agree on these.
const (
	UserName   = "user" // the ordinary user: shells, files, Chrome
	UserUID    = 1000
	UserGID    = 1000
	BrowserGID = 900 // Chrome's own primary group, "browser"; nftables lets it reach loopback and EgressAddr only
	Workspace  = "/workspace"
	Downloads  = "/workspace/downloads"

	// SlotAddr is the slot's own address (link-local, on lo inside the slot):
	// hostd listens there for the machine.
	SlotAddr   = "169.254.77.1"
	EgressPort = 78 // HTTP proxy and SOCKS5, tunnelled to proxyd; below 80, where nothing in the machine may listen
	DNSPort    = 53

	// A machine with a kernel of its own is behind a tap device in its slot. The
	// same addresses in every slot, so that a memory fits each.
	TapName   = "vm0"
	TapAddr   = "169.254.78.1" // the slot's end
	TapMAC    = "02:be:27:00:00:03"
	GuestAddr = "169.254.78.2" // eth0 in the guest, /30; its default route is TapAddr
	GuestMAC  = "02:be:27:00:00:04"
	AgentPort = 77 // the agent's listening socket in the guest, open to TapAddr alone
)

// ProxyVars are the variables that tell programs of the egress listener (spec
// "Shell", scope all), in upper and lower case: an http URL for all, which every
// client understands, and what is never proxied.
func ProxyVars() map[string]string {
	url, direct := fmt.Sprintf("http://%s:%d", SlotAddr, EgressPort), "localhost,127.0.0.1,::1"
	return map[string]string{
		"HTTP_PROXY": url, "HTTPS_PROXY": url, "ALL_PROXY": url, "NO_PROXY": direct,
		"http_proxy": url, "https_proxy": url, "all_proxy": url, "no_proxy": direct,
	}
}
