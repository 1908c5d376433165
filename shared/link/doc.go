// Package link is the session link: an ordered, exactly-once byte stream
// between gateway and agent (a net.Conn) that outlives the transports under it.
//
// The gateway opens a stream with Dial; the agent takes it from a Listener.
// Under a stream lies one transport at a time (a TCP or unix connection that a
// hostd splices towards the machine). When it breaks, the gateway dials
// another, both sides tell what they have received, and each resends the rest.
// Reads and writes pause meanwhile; nothing is lost, doubled or reordered. A
// stream that stays broken for Options.Keep fails with an error whose
// Timeout() is true.
//
// A Conn is a full net.Conn with CloseWrite and Abort; all its methods may be
// called at once from several goroutines. DESIGN.md tells how it works, wire.go
// what goes over the wire.
package link
